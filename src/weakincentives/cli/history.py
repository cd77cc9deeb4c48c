"""`wink log`, `show`, `diff`, `undo`, `rewind`: what calls did to a workspace, and going back."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from weakincentives.cli.common import (
    InUse,
    Misuse,
    diff_style,
    echo,
    examples,
    existing_directory,
    find_run,
    say,
    shortened,
    summary_of,
)
from weakincentives.cli.doctor import was_killed
from weakincentives.cli.fetching import where_to_look
from weakincentives.cli.options import (
    AsJson,
    Before,
    CallName,
    DatabaseUrl,
    Everything,
    RunOrCall,
    Workspace,
    complete_calls,
    run_argument,
)
from weakincentives.core.text import counted, harmless
from weakincentives.errors import (
    FilesystemError,
    RowUndoRefused,
    SnapshotError,
    UndoRefused,
    WorkspaceLocked,
)

if TYPE_CHECKING:
    from weakincentives.filesystem import CallChanges, Committed, FileChange, HostFilesystem
    from weakincentives.filesystem.diffs import Detail
    from weakincentives.runtime.calls import Call, Calls, Run
    from weakincentives.runtime.rewind import Parts, Rewound
    from weakincentives.runtime.rows import RowChange, RowHistory
    from weakincentives.runtime.undo import Preview

_SEE = "`wink log` lists the calls"

LastCall = Annotated[bool, typer.Option("--last", help="Only the last call that changed files.")]
Force = Annotated[
    bool, typer.Option("--force", help="Also replace later changes; the history still has them.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")]
WithoutAsking = Annotated[
    bool, typer.Option("--yes", "-y", help="Do not ask, on a terminal either.")
]


@examples(
    "wink log                      # the last calls, and what each changed",
    "wink log k3f -n 0             # all calls of one run",
    "wink log k3f --database postgresql://wink@db/wink   # a run of `wink submit`",
    "wink log --json | jq .tool",
    more="Works while an agent is running.",
)
def log(
    run: Annotated[
        str | None,
        run_argument("Only this run: a prefix of its id, the letters at its end, or its branch."),
    ] = None,
    workspace: Workspace = Path(),
    database: DatabaseUrl = None,
    count: Annotated[
        int, typer.Option("-n", metavar="N", min=0, help="How many calls; 0 shows all.")
    ] = 20,
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:
    """List recent calls and what each changed."""
    if database is not None and run is None:
        raise Misuse("name a run; `wink ps --all` lists those of the database")
    workspace = where_to_look(run, workspace, database)
    calls, files = _opened(workspace, everything)
    only = None if run is None else find_run(calls.workspace, run)
    found = calls.latest(count or None, only)
    say(*calls.history.damaged(), *calls.damage(), *calls.unreadable)
    for each in {call.run.id: call.run for call in found if call.run is not None}.values():
        if times := each.compactions:
            how_often = "once" if times == 1 else f"{times} times"
            echo(f"{each.mark}: the context window was full; compacted {how_often}", err=True)
    if as_json:
        for call in found:
            echo(json.dumps(_summary(call, files)))
        return
    if not found:
        echo(
            f"No calls are recorded in {calls.workspace} yet. To record those of a coding agent: "
            "wink hook install AGENT, or: wink exec -- AGENT",
            err=True,
        )
    _print(_log_lines(found, calls, files))


@examples(
    "wink show k3f/2               # the second call of the run that ends in k3f",
    "wink show 2                   # the second call of the last run",
    "wink show k3f/2:src/a.py      # the file as it was just after the call; --before: before it",
    "wink show k3f/2:src           # the directory; k3f/2: is the whole workspace",
    "wink show k3f/2 --export DIR  # all files as they were, in a new directory",
    more="The directory is never changed, and an agent can be running.",
)
def show(
    call: Annotated[
        str,
        typer.Argument(
            metavar="CALL[:PATH]",
            help="RUN/N, N of the last run, or the id of a call; PATH is a file or directory.",
            autocompletion=complete_calls,
            show_default=False,
        ),
    ],
    workspace: Workspace = Path(),
    before: Before = False,
    export: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Create a directory with all files as they were."),
    ] = None,
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:
    """Show one call, or files as they were at a call.

    Of a call: its arguments, its result, why it was denied or rolled back, the files it changed.
    """
    calls, files = _opened(workspace, everything)
    wanted, path = _call_and_path(calls, call)
    if path is not None or export is not None:
        if as_json or (path is not None and export is not None):
            raise Misuse("name only one of CALL:PATH, --export and --json")
        return _show_files(calls, wanted, path, export, before=before)
    if before:
        raise Misuse(f"--before needs a path, such as {call}:README.md, or --export")
    (found,) = calls.with_files([wanted])
    if as_json:
        result = {} if found.record is None else {"result": found.shown}
        echo(json.dumps({**_summary(found, files), **found.details, **result}))
    else:
        _print(_detail_lines(found, files))
    return None


@examples(
    "wink diff                     # all that the last run changed",
    "wink diff k3f/2               # one call; or --last: the last one",
    "wink diff k3f | git apply --reverse",
    more="The exit code is 1 if there is nothing to show, and 3 if the patch lacks something: "
    "standard error says what.",
)
def diff(
    named: RunOrCall = None,
    workspace: Workspace = Path(),
    last: LastCall = False,
    everything: Everything = False,
    as_json: AsJson = False,
) -> int:
    """Show the changes of a run or call, as a patch for git."""
    from weakincentives.runtime.undo import committed_of

    calls, files = _opened(workspace, everything)
    chosen = [each for each in _chosen(calls, named, last=last) if each.has_changes]
    committed = committed_of(chosen)
    if not chosen:
        say(_nothing_left(calls) or f"no files were changed here, or {_FORGOTTEN}; {_SEE}")
        return 1
    if not any(each.can_be_undone for each in chosen):
        say(f"{_named(chosen)} is undone; this is what it changed")
    rows = [each for call in calls.with_files(chosen) for each in call.rows]
    if not committed:
        print_rows(rows, as_json=as_json)
        return 0
    history = calls.history_on(chosen[-1].branch)
    found = history.diff(committed, detail=files.is_shown, raw=not as_json)
    code = print_diff(found, files, as_json=as_json)
    print_rows(rows, as_json=as_json)
    later = [path for path, by in history.changed_since(committed).items() if not by]
    if later and was_killed(calls.workspace):
        say(_KILLED)
    elif later:
        say(f"these files have changed since, outside wink (not shown): {_joined(later)}")
    return code


@examples(
    "wink undo                     # the last run; again: the run before",
    "wink undo --last              # only the last call",
    "wink undo k3f/2               # just this call",
    "wink undo --to k3f/2          # this call and everything after it",
    "wink undo k3f --dry-run",
    "wink undo undo_7              # undo an undo",
    more="On a terminal it first shows the changes, and asks. Files and rows are undone, not the "
    "session of the run: see `wink rewind`. The exit code is 1 if nothing was undone, and 3 if "
    "something is left: standard error says what.",
)
def undo(
    named: RunOrCall = None,
    workspace: Workspace = Path(),
    last: LastCall = False,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="CALL",
            help="Undo this call and everything after it.",
            autocompletion=complete_calls,
        ),
    ] = None,
    force: Force = False,
    dry_run: DryRun = False,
    yes: WithoutAsking = False,
    everything: Everything = False,
    as_json: AsJson = False,
) -> int:
    """Undo what a run or call changed in files and rows.

    An undo can be undone: it is a call itself.
    """
    from weakincentives.runtime.undo import preview_undo

    if to is not None and (last or named is not None):
        raise Misuse("name only one of a run or call, --last and --to")
    calls, files = _opened(workspace, everything)
    killed = was_killed(calls.workspace)
    if killed and not dry_run:
        calls = _recovered(calls, files)
    talk = _Talk(files, is_asking=not yes and not as_json and not dry_run, as_json=as_json)
    chosen = _from(calls, to) if to is not None else _chosen(calls, named, last=last)
    if named is not None and len(chosen) == 1 and _undoes_rewind(calls, chosen[0]):
        rewound = _Rewind(calls=calls, target=chosen[0], talk=talk, before=True)
        return rewound.perform(force, dry_run)
    left = [e for e in chosen if e.has_changes and (to is not None or e.can_be_undone)]
    if not left:
        nothing = f"no files were changed here, or it is already undone, or {_FORGOTTEN}"
        say(f"nothing to undo: {_nothing_left(calls) or nothing}; {_SEE}")
        return 1
    if killed and dry_run:
        say(_KILLED)  # the killed call's changes may be in the way
    if dry_run or talk.is_asking:
        are_in_the_way = force or (killed and dry_run)
        try:
            found = preview_undo(calls, left, force=are_in_the_way, detail=files.is_shown)
        except UndoRefused as error:
            return _refuse(calls, error.paths, left, talk)
        except RowUndoRefused as error:
            say(f"nothing was undone: {error}")
            return 1
        if dry_run:
            return talk.preview(found)
        if not talk.confirmed(found, f"Undo {_named(left)}?"):
            return 1
    return _undo(calls, left, talk, force=force)


@examples(
    "wink rewind k3f/4             # files, session and conversation as just after this call",
    "wink rewind k3f/4 --before    # as before it",
    "wink rewind k3f/4 --dry-run   # only show what would change in files",
    "wink undo k3f/9               # undo the rewind, which is a call itself",
    'wink resume k3f "now with pytest"',
    more="On a terminal it first shows the changes, and asks. The exit code is 3 if something is "
    "left as it was edited: standard error says what.",
)
def rewind(
    call: CallName,
    workspace: Workspace = Path(),
    before: Before = False,
    files_only: Annotated[
        bool, typer.Option("--files-only", help="Leave session and conversation as they are.")
    ] = False,
    conversation_only: Annotated[
        bool, typer.Option("--conversation-only", help="Leave the files as they are.")
    ] = False,
    force: Force = False,
    dry_run: DryRun = False,
    yes: WithoutAsking = False,
    everything: Everything = False,
    as_json: AsJson = False,
) -> int:
    """Go back to a call: files, session and conversation.

    Your later edits stay, and are listed. Calls after it can be reached again.
    """
    if files_only and conversation_only:
        raise Misuse("name only one of --files-only and --conversation-only")
    calls, files = _opened(workspace, everything)
    if was_killed(calls.workspace) and not dry_run:
        calls = _recovered(calls, files)
    target = find_call(calls, call)
    parts = "files" if files_only else "conversation" if conversation_only else "all"
    talk = _Talk(files, is_asking=not yes and not as_json and not dry_run, as_json=as_json)
    rewound = _Rewind(calls=calls, target=target, talk=talk, before=before, parts=parts)
    return rewound.perform(force, dry_run)


_FORGOTTEN = "the history no longer has them"


# Choosing calls


class Files:
    """What is shown of changed files: ignored ones are counted, and long lists cut."""

    def __init__(self, workspace: Path, everything: bool) -> None:
        from weakincentives.filesystem.ignored import IgnoredFiles

        self.ignored = IgnoredFiles(workspace)
        self.everything = everything

    def is_shown(self, path: str) -> bool:
        return self.everything or not self.ignored(path)

    def hidden(self, files: Iterable[FileChange]) -> str:
        """Return how many files are not shown, and where they are; or nothing."""
        return "" if self.everything else self.ignored.summary(each.path for each in files)

    def lines(self, files: Sequence[FileChange], indent: str = "") -> Iterable[Line]:
        shown = [each for each in files if self.is_shown(each.path)]
        most = len(shown) if self.everything else _MOST_FILES
        for each in shown[:most]:
            yield [(indent, ""), *_changed(each)]
        if len(shown) > most:
            yield [(f"{indent}  and {len(shown) - most} more files; --all lists them", "dim")]
        if hidden := self.hidden(files):
            yield [(f"{indent}  {hidden}", "dim")]


_MOST_FILES = 10


def _opened(workspace: Path, everything: bool) -> tuple[Calls, Files]:
    from weakincentives.contrib.databases import known_databases
    from weakincentives.runtime.calls import Calls

    directory = existing_directory(workspace)
    files = Files(directory, everything)
    return Calls(directory, detail=files.is_shown, databases=known_databases(directory)), files


def find_call(calls: Calls, wanted: str) -> Call:
    """Return a call by its id, as RUN/N, or as N of the last run; otherwise raise Misuse."""
    run, slash, number = wanted.rpartition("/")
    if slash and number.isdecimal():
        return _numbered(calls, find_run(calls.workspace, run), number)
    if wanted.isdecimal() and calls.runs:
        return _numbered(calls, calls.newest_runs[0], wanted)
    found = calls.by_id(wanted)
    if found is None:
        raise Misuse(f"no call {wanted!r} in {calls.workspace}; {_SEE}")
    return found


def _call_and_path(calls: Calls, wanted: str) -> tuple[Call, str | None]:
    """Split CALL:PATH. The id of a call may have colons itself."""
    call, colon, path = wanted.partition(":")
    if not colon:
        return find_call(calls, wanted), None
    if call.rpartition("/")[2].isdecimal():
        return find_call(calls, call), path
    for place in (len(wanted), *(n for n, each in enumerate(wanted) if each == ":")):
        found = calls.by_id(wanted[:place])
        if found is not None:
            return found, wanted[place + 1 :] if place < len(wanted) else None
    raise Misuse(f"no call {call!r} in {calls.workspace}; {_SEE}")


def _numbered(calls: Calls, run: Run, number: str) -> Call:
    found = _calls_of(calls, run)
    for call in found:
        if str(call.number) == number:
            return call
    has = f"only {counted(len(found), 'call')}" if found else "no calls"
    raise Misuse(f"no call {number} in the run {run.id}, which has {has}")


def _calls_of(calls: Calls, run: Run) -> list[Call]:
    with _reading(run):
        return calls.of_run(run)


@contextmanager
def _reading(run: Run) -> Generator[None]:
    """Raise Misuse if a run cannot be read."""
    try:
        yield
    except (OSError, SnapshotError) as error:
        raise Misuse(f"cannot read the run {run.id}: {error}") from error


def _call_or_run(calls: Calls, named: str) -> Call | Run:
    """Return a call or a run; a short number is always a call of the last run."""
    is_call = "/" in named or (named.isdecimal() and len(named) < _DATE)
    try:
        return find_call(calls, named)
    except Misuse:
        if is_call:
            raise
    try:
        return find_run(calls.workspace, named)
    except Misuse as error:
        if "matches" in str(error) or not named:
            raise
        raise Misuse(f"no run or call {named!r} in {calls.workspace}; {_SEE}") from error


_DATE = 8
"""Digits of the day with which the id of a run begins."""


def _chosen(calls: Calls, named: str | None, *, last: bool) -> list[Call]:
    """Return a call, or those of a run, by default the last one that is not undone."""
    from weakincentives.runtime.calls import Call, in_place
    from weakincentives.runtime.undo import calls_to_undo

    if named is not None and last:
        raise Misuse("name only one of a run or call, and --last")
    if named is not None:
        wanted = _call_or_run(calls, named)
        if isinstance(wanted, Call):
            return [wanted]
        with _reading(wanted):
            return calls_to_undo(calls, wanted)
    if last:
        return [each for each in calls.changed() if each.can_be_undone and not each.undoes][-1:]
    groups = calls.by_run()
    for group in reversed(groups):
        if found := in_place(group):
            if group is not groups[-1]:
                say(f"{_named(groups[-1])} is already undone; before it came {_named(group)}")
            return found
    return []


def _nothing_left(calls: Calls) -> str:
    """Say that the last run is undone, if nothing else is left; else nothing."""
    from weakincentives.runtime.calls import in_place

    groups = calls.by_run()
    if not groups or any(map(in_place, groups)):
        return ""
    every = "" if len(groups) == 1 else ", and so is everything before it"
    return f"{_named(groups[-1])} is already undone{every}"


def _named(chosen: Sequence[Call]) -> str:
    """Return the name of a run, or of a few calls, for a message."""
    run = chosen[0].run
    if run is None or len(chosen) == 1:
        return ", ".join(f"{each.name} {each.tool}".strip() for each in chosen[:3])
    title = f": {shortened(run.title, 60)}" if run.title else ""
    return f"the run {run.mark} ({counted(len(chosen), 'call')}{title})"


def _joined(paths: Sequence[str]) -> str:
    named = ", ".join(map(harmless, paths[:_MOST_FILES]))
    more = len(paths) - _MOST_FILES
    return f"{named} and {more} more" if more > 0 else named


def _from(calls: Calls, first: str) -> list[Call]:
    """Return a call and all after it, undone or not: the files go back step by step."""
    found = find_call(calls, first)
    if not found.has_changes:
        raise Misuse(f"{first} changed no files; {_SEE}")
    changed = calls.changed(found.branch)
    ids = [call.call_id for call in changed]
    return changed[ids.index(found.call_id) :]


# Undoing

_SOMETHING_LEFT = 3
"""The exit code if something is not as it was before: what others have changed since stays."""
_KILLED = (
    "a call was killed, and its changes are still there (not shown); the next command that opens "
    "the directory, such as `wink undo`, rolls it back first"
)


def _recovered(calls: Calls, shown: Files) -> Calls:
    """Roll back a killed call, and read the history again."""
    with _writable(calls.workspace, "") as files:
        left = files.recovered
    say("a call was killed; its changes were rolled back first", *left)
    return _opened(calls.workspace, shown.everything)[0]


class _Talk:
    """How an undo or rewind is shown and asked about: on a terminal, in plain lines, or as JSON."""

    def __init__(self, shown: Files, *, is_asking: bool, as_json: bool) -> None:
        self.shown = shown
        self.is_asking = is_asking and sys.stdin.isatty() and sys.stdout.isatty()
        self.as_json = as_json

    def preview(self, found: Preview) -> int:
        """Print what would change, and what would stay; return the exit code."""
        rows = [(each, made.changes) for each, made in found.rows]
        if self.as_json:
            more = {"rows": list(map(_row, flat(rows)))} if rows else {}
            self.tell(dry_run=True, changes=found.changes, staying=list(found.staying), **more)
            return 0
        self._staying(found)
        code = print_diff(found.changes, self.shown) if found.changes else 0
        print_rows(rows)
        if not found.changes and not flat(rows):
            echo("No files would change.", err=True)
        return code

    def confirmed(self, found: Preview, question: str) -> bool:
        """Show what will change, and ask."""
        self._staying(found)
        rows = list(row_lines([(each, made.changes) for each, made in found.rows]))
        if not found.changes and not rows:
            echo("No files will change.")
        else:
            _print([[("This changes:", "bold")], *self.shown.lines(found.changes), *rows])
        return typer.confirm(question, default=True)

    def done(self, title: str, changes: Sequence[FileChange], rows: RowsOf = ()) -> None:
        """Say what was done; the files were listed already where it was asked about."""
        lines: list[Line] = [[(title, "bold")]]
        if not self.is_asking:
            lines += [*self.shown.lines(changes), *row_lines(rows)]
        _print(lines)

    def tell(self, *, changes: Sequence[FileChange], **more: object) -> None:
        files = [_file(each, self.shown) for each in changes]
        echo(json.dumps({**more, "files": files}))

    def _staying(self, found: Preview) -> None:
        from weakincentives.runtime.rows import notes_on

        for path in found.staying:
            say(f"{harmless(path)} was changed outside wink since, and would stay")
        say(*notes_on(found.rows))


def _undo(calls: Calls, chosen: Sequence[Call], talk: _Talk, *, force: bool) -> int:
    from weakincentives.runtime.undo import undo_calls

    with _writable(calls.workspace, chosen[-1].branch) as files:
        say(*files.recovered)
        try:
            undone = undo_calls(calls, files, chosen, force=force)
        except UndoRefused as error:  # changed at this very moment
            return _refuse(calls, error.paths, chosen, talk)
        except (FilesystemError, RowUndoRefused) as error:
            say(f"nothing was undone: {error}")
            return 1
        except OSError as error:
            say(f"nothing was undone: {error.strerror or error}")
            return 1
    say(*undone.notes)
    if not undone.call_id:
        say("nothing was undone")
        return 1
    newest = _newest(calls.workspace, chosen[-1].branch, talk.shown)
    is_there = newest is not None and newest.call.call_id == undone.call_id
    changes = newest.files if newest is not None and is_there else ()
    rows = [(each, found.changes) for each, found in undone.rows]
    where = f"{chosen[-1].branch}/" if chosen[-1].branch else ""
    name, code = f"{where}{undone.call_id}", _SOMETHING_LEFT if undone.notes else 0
    if talk.as_json:
        more: dict[str, object] = {"rows": list(map(_row, flat(rows)))} if rows else {}
        names = [each.name for each in chosen]
        talk.tell(undone=names, undo=name, notes=list(undone.notes), changes=changes, **more)
        return code
    talk.done(f"Undone: {_named(chosen)}", changes, rows)
    echo(f"To redo it: wink undo {name}")
    if any(each.run is not None for each in chosen):
        what = "files and rows" if rows else "files"
        echo(f"Only {what} were undone. The agent's conversation is unchanged.")
    return code


@contextmanager
def _writable(workspace: Path, branch: str) -> Generator[HostFilesystem]:
    """Open a branch, or the directory if the name is empty; raise Misuse if it is in use."""
    from weakincentives.runtime.undo import open_files

    try:
        files = open_files(workspace, branch)
    except WorkspaceLocked as error:
        raise InUse(error, f"the branch {branch}" if branch else str(workspace)) from error
    except (FilesystemError, NotImplementedError) as error:
        raise Misuse(str(error)) from error
    with files:
        yield files


def _newest(workspace: Path, branch: str, shown: Files) -> CallChanges | None:
    """Return the newest entry of the history, and its files."""
    from weakincentives.runtime.calls import Calls

    return next(Calls(workspace).history_on(branch).changes(shown.is_shown), None)


def _refuse(
    calls: Calls,
    paths: Mapping[str, Sequence[str]],
    chosen: Sequence[Call],
    talk: _Talk,
    what: str = "undone",
) -> int:
    names = calls.names()
    if talk.as_json:
        refused = {path: [names.get(each, each) for each in by] for path, by in paths.items()}
        talk.tell(refused=refused, changes=())
        return 1
    say(f"nothing was {what}: these files have changed since:")
    for path, by in list(paths.items())[:_MOST_FILES]:
        who = ", ".join(names.get(each, each) for each in by) or "a person or program outside wink"
        echo(f"  {harmless(path)}: changed by {who}", err=True)
    if len(paths) > _MOST_FILES:
        echo(f"  and {counted(len(paths) - _MOST_FILES, 'more file')}", err=True)
    if any(paths.values()):
        way = f"all of these calls with: wink undo --to {chosen[0].name}"
        echo(f"Undo {way if what == 'undone' else 'these calls first'}", err=True)
    echo("Use --force to replace them anyway; the history keeps what they hold now.", err=True)
    return 1


# Rewinding


def _undoes_rewind(calls: Calls, call: Call) -> bool:
    from weakincentives.runtime.undo import undoes_rewind

    try:
        return undoes_rewind(calls, call)
    except ValueError as error:
        raise Misuse(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class _Rewind:
    """A rewind to a call of a run."""

    calls: Calls
    target: Call
    talk: _Talk
    before: bool
    parts: Parts = "all"

    @property
    def _run(self) -> Run:
        if self.target.run is None:
            raise Misuse(f"{self.target.name} is not a call of a run; to undo its files: wink undo")
        return self.target.run

    @property
    def _branch(self) -> str:
        """Where the run works now."""
        return self._run.branch if self._run.branch in self.calls.branches else ""

    def perform(self, force: bool, dry_run: bool) -> int:
        """Rewind, or show what would change; returns the exit code."""
        try:
            if dry_run:
                return self.talk.preview(self._preview(force))
            if self.talk.is_asking:
                where = "before" if self.before else "just after"
                question = f"Rewind to {where} {self.target.name} {_tool(self.target)}?"
                if not self.talk.confirmed(self._preview(force), question):
                    return 1
            return self._rewind(force)
        except UndoRefused as error:
            return _refuse(self.calls, error.paths, [self.target], self.talk, "rewound")
        except RowUndoRefused as error:
            say(f"nothing was rewound: {error}")
            return 1
        except LookupError as error:
            raise Misuse(f"cannot rewind: {error.args[0]}") from error

    def _preview(self, force: bool) -> Preview:
        from weakincentives.runtime.undo import preview_rewind

        return preview_rewind(
            self.calls,
            self.target,
            self._run,
            before=self.before,
            parts=self.parts,
            force=force,
            detail=self.talk.shown.is_shown,
        )

    def _rewind(self, force: bool) -> int:
        from weakincentives.cli.config import load_settings
        from weakincentives.cli.saved_runs import open_session, with_flags_of
        from weakincentives.runtime.rewind import rewind_run

        flags, stored = with_flags_of(self._run, {})
        settings = load_settings(self.calls.workspace, stored=stored, **flags)
        with (
            _writable(self.calls.workspace, self._branch) as files,
            open_session(self._run, settings) as saved,
        ):
            say(*files.recovered)
            done = rewind_run(
                saved,
                files,
                self.target.number,
                before=self.before,
                parts=self.parts,
                force=force,
                databases=self.calls.databases,
            )
        say(*done.notes)
        self._report(done)
        return _SOMETHING_LEFT if done.notes else 0

    def _report(self, done: Rewound) -> None:
        when = "before" if self.before else "after"
        only = "" if self.parts == "all" else f" ({self.parts} only)"
        newest = _newest(self.calls.workspace, self._branch, self.talk.shown)
        is_there = newest is not None and newest.call.call_id == done.call_id
        changes = newest.files if newest is not None and is_there else ()
        rows = [(each, found.changes) for each, found in done.rows]
        mark = self._run.mark
        if self.talk.as_json:
            rewound = {"rewound_to": self.target.name, "before": self.before, "parts": self.parts}
            call = f"{mark}/{done.number}"
            more = {"rows": list(map(_row, flat(rows)))} if rows else {}
            self.talk.tell(**rewound, call=call, notes=list(done.notes), changes=changes, **more)
            return
        title = f"Rewound to {when} {self.target.name} {_tool(self.target)}{only}"
        self.talk.done(title, changes, rows)
        echo(f"To undo the rewind: wink undo {mark}/{done.number}")
        if self.parts != "files" and self._run.data.about.get("kind") == "run":
            echo(f'To continue from here: wink resume {mark} "..."')


# Files as they were


def _show_files(
    calls: Calls, call: Call, path: str | None, export: Path | None, *, before: bool
) -> None:
    """Print a file, list a directory, or export everything."""
    try:
        files = calls.files_at(call, before=before)
    except LookupError as error:
        raise Misuse(str(error.args[0])) from error
    if export is not None:
        files.export(export)
        echo(f"exported to {export}", err=True)
        return
    where = path or "."
    if files.stat(where).kind != "directory":
        _print_content(files.read_bytes(where))
        return
    for each in files.list(where):
        name = harmless(each.path)
        echo(f"{name}/" if each.kind == "directory" else name)
    for name in files.unnamed(where):
        echo(f"{name}  (not UTF-8)")


def _print_content(data: bytes) -> None:
    if sys.stdout.isatty():
        echo(data.decode(errors="backslashreplace").removesuffix("\n"))
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


# Output

Line = Sequence[tuple[str, str]]
"""Pieces of text, each with a style."""
_STYLES = {
    "committed": "green",
    "ok": "",
    "undo": "cyan",
    "undone": "dim",
    "partly undone": "yellow",
    "dry run": "dim",
    "denied": "yellow",
    "refused": "yellow",
    "rolled back": "red",
    "suspended": "yellow",
}


def _summary(call: Call, files: Files) -> dict[str, object]:
    return {
        "call": call.name,
        "call_id": call.call_id,
        "run": None if call.run is None else call.run.id,
        "branch": call.branch or None,
        "time": call.time,
        "tool": call.tool,
        "arguments": call.arguments,
        "outcome": call.outcome,
        "nested_in": None if call.outer is None else call.outer.name,
        "files": [_file(each, files) for each in call.files],
        "undoes": list(call.undoes),
        **({"rows": list(map(_row, flat(call.rows)))} if call.rows else {}),
    }


RowsOf: TypeAlias = "Sequence[tuple[RowHistory, Sequence[RowChange]]]"


def flat(rows: RowsOf) -> list[tuple[RowHistory, RowChange]]:
    return [(database, each) for database, changes in rows for each in changes]


def _row(changed: tuple[RowHistory, RowChange]) -> dict[str, object]:
    database, each = changed
    return {
        "database": database.title,
        "table": each.table,
        "key": list(each.key),
        "before": None if each.before is None else dict(each.before),
        "after": None if each.after is None else dict(each.after),
        **({"note": each.note} if each.note else {}),
    }


def row_lines(rows: RowsOf, indent: str = "") -> Iterable[Line]:
    """Return a line for each table of which calls changed rows."""
    from weakincentives.runtime.rows import by_table

    for database, changes in rows:
        where = f"{database.title}: " if len(rows) > 1 else ""
        for each in by_table(changes):
            yield [(f"{indent}  {harmless(f'{where}{each}')}", "")]


def print_rows(rows: RowsOf, *, as_json: bool = False) -> None:
    """Print each changed row before and after; a patch above can still be applied."""
    if as_json:
        for each in flat(rows):
            echo(json.dumps(_row(each), default=str))
        return
    lines: list[Line] = []
    for database, each in flat(rows):
        lines.append([(harmless(f"row {each.name} in {database.title}"), "bold")])
        if each.note:
            lines.append([(f"  {each.note}", "dim")])
        for sign, row in (("-", each.before), ("+", each.after)):
            if row is not None:
                text = json.dumps(dict(row), default=str, ensure_ascii=False)
                lines.append([(harmless(f"{sign} {text}"), diff_style(sign))])
    _print(lines)


def _file(change: FileChange, files: Files) -> dict[str, object]:
    return {
        "path": change.path,
        "origin": change.origin,
        "added": change.added,
        "removed": change.removed,
        "ignored": files.ignored(change.path),
    }


def _log_lines(found: Sequence[Call], calls: Calls, files: Files) -> Iterable[Line]:
    from weakincentives.serde.exact import plain

    names = calls.names()
    name = max((len(call.name) for call in found), default=0)
    tool = max((len(_tool(call)) for call in found), default=0)
    outcome = max((len(call.outcome) for call in found), default=0)
    outcome = max(outcome, len("rolled back"))
    shown = Counter(call.run for call in found)
    run: Run | None = None
    for call in found:
        if call.run is not run and call.run is not None:
            yield _run_line(call.run, calls, shown.pop(call.run, 0))
        run = call.run
        moment = _local(call.time).strftime("%H:%M:%S" if call.run else "%Y-%m-%d %H:%M:%S")
        undoes = ", ".join(names.get(each, each) for each in call.undoes)
        yield [
            (f"{call.name:>{name}}  ", "bold"),
            (f"{moment}  ", "dim"),
            (f"{_tool(call):<{tool}}  ", ""),
            (f"{call.outcome:<{outcome}}  ", _STYLES[call.outcome]),
            (summary_of(call.arguments, 50) or (undoes and f"of {undoes}"), ""),
        ]
        indent = " " * (name + 2)
        yield from files.lines(call.files, indent)
        yield from row_lines(call.rows, indent)
        if call.outcome in ("denied", "refused", "rolled back"):
            message = str(plain(call.result.get("message", "")))
            yield [(f"{indent}  {shortened(message, 90)}", "dim")]


def _run_line(run: Run, calls: Calls, shown: int) -> Line:
    """Return the line above the calls of a run; ``shown`` is 0 where they go on after others."""
    from weakincentives.runtime.calls import in_place

    every = calls.of_run(run)
    is_undone = any(each.has_changes for each in every) and not in_place(every)
    about = ["continued"] if not shown else []
    about += [f"branch {run.branch}"] if run.branch in calls.branches else []
    about += [f"{shown} of {len(every)} calls"] if 0 < shown < len(every) else []
    about += ["undone"] if is_undone else []
    return [
        (run.id, "bold cyan"),
        (f"  {_local(run.data.began):%Y-%m-%d %H:%M}  ", "dim"),
        (shortened(run.title, 60), "italic"),
        (f"  ({', '.join(about)})" if about else "", "dim"),
    ]


def _changed(change: FileChange) -> Line:
    origin = f"{harmless(change.origin)} -> " if change.origin else ""
    path, what = f"  {origin}{harmless(change.path)}", change.note
    if not what and change.is_binary:
        what = "binary"
    elif not what and "\nnew mode " in change.text:
        what = "now executable" if "\nnew mode 100755" in change.text else "no longer executable"
    if what and not change.added and not change.removed:
        return [(f"{path}: {what}", "")]
    return [
        (f"{path} ", ""),
        (f"+{change.added}", "green" if change.added else "dim"),
        (" ", ""),
        (f"-{change.removed}", "red" if change.removed else "dim"),
    ]


def _tool(call: Call) -> str:
    return harmless(call.tool) or ("undo" if call.undoes else "(no tool)")


def _detail_lines(call: Call, files: Files) -> Iterable[Line]:
    details = call.details
    took = f", took {details['duration']:.3f} s" if details else ""
    attempts = details.get("attempts", 1)
    fields = {
        "call": f"{call.name}  ({call.call_id})",
        "run": "" if call.run is None else f"{call.run.id}  {call.run.title}",
        "branch": call.branch,
        "tool": _tool(call),
        "when": f"{_local(call.time):%Y-%m-%d %H:%M:%S}{took}",
        "nested in": "" if call.outer is None else call.outer.name,
        "outcome": call.outcome,
        "denied by": details.get("denied_by", ""),
        "attempts": "" if attempts == 1 else str(attempts),
        "notes": ", ".join(details.get("notes", ())),
        "conflicts": ", ".join(details.get("conflicts", ())),
        "rolled back": ", ".join(details.get("rolled_back", ())),
        "not undone": ", ".join(details.get("not_rolled_back", ())),
        "degraded": ", ".join(details.get("degraded", ())),
        "undoes": ", ".join(call.undoes),
    }
    for label, value in fields.items():
        if value:
            style = _STYLES[call.outcome] if label == "outcome" else ""
            yield [(f"{label:<13}", "bold"), (harmless(value), style)]
    if call.arguments not in (None, {}):
        yield from _block("arguments", json.dumps(call.arguments, indent=2, ensure_ascii=False))
    if call.record is not None:
        yield from _block("what the model saw", call.shown)
    if call.files:
        yield [("files", "bold")]
        yield from files.lines(call.files)
        yield [(f"  wink diff {call.name}; wink undo {call.name}", "dim")]
    if call.rows:
        yield [("rows", "bold")]
        yield from row_lines(call.rows)
        if not call.files:
            yield [(f"  wink diff {call.name}; wink undo {call.name}", "dim")]
    if not call.has_changes and call.outcome == "ok":
        yield [("files        ", "bold"), ("none changed, or the history no longer has them", "")]


def _block(label: str, text: str) -> Iterable[Line]:
    yield [(label, "bold")]
    for line in harmless(text, lines=True).split("\n"):
        yield [(f"  {line}", "")]


def _print(lines: Iterable[Line]) -> None:
    """Print lines, in colour on a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for line in lines:
        console.print(Text.assemble(*((harmless(text, lines=True), style) for text, style in line)))


def print_diff(changes: Sequence[FileChange], files: Files, *, as_json: bool = False) -> int:
    """Print a patch, and on standard error what it lacks; return the exit code.

    As JSON: one object per file, with its part of the patch.
    """
    if as_json:
        for each in changes:
            more = {"note": each.note, "complete": each.is_complete, "patch": each.text}
            echo(json.dumps({**_file(each, files), **more}))
    elif sys.stdout.isatty():
        texts = (_without_binary(change) for change in changes)
        _print([(line, diff_style(line))] for text in texts for line in text.split("\n")[:-1])
    else:  # byte for byte, for `git apply`
        sys.stdout.flush()
        for change in changes:
            sys.stdout.buffer.write(change.text.encode(errors="surrogateescape"))
        sys.stdout.buffer.flush()
    told = [f"{harmless(each.path)}: {each.note}" for each in changes if each.note]
    most = len(told) if files.everything else _MOST_FILES
    for note in told[:most]:
        echo(note, err=True)
    if len(told) > most:
        echo(f"and {len(told) - most} more; --all lists them", err=True)
    if hidden := files.hidden(changes):
        echo(f"{hidden}; --all shows them", err=True)
    lacking = [each.path for each in changes if not each.is_complete]
    if lacking:
        say(f"the patch is not complete: it lacks {_joined(lacking)}")
    return 3 if lacking else 0


def show_diff(workspace: Path, committed: Sequence[Committed], branch: str = "") -> None:
    """Print what some calls changed, as `wink diff` does."""
    calls, files = _opened(workspace, everything=False)
    print_diff(calls.history_on(branch).diff(committed, detail=files.is_shown), files)


def show_changes(workspace: Path, changes: Callable[[Detail], Sequence[FileChange]]) -> None:
    """Print changes that are not committed yet, as `wink diff` does."""
    files = Files(workspace, everything=False)
    print_diff(changes(files.is_shown), files)


def _without_binary(change: FileChange) -> str:
    start = change.text.find("GIT binary patch\n") if change.is_binary else -1
    return change.text if start < 0 else f"{change.text[:start]}Binary file\n"


def _local(moment: float) -> datetime:
    return datetime.fromtimestamp(moment)
