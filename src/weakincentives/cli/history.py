"""`wink log`, `show`, `diff` and `undo`: what the calls on a workspace did, and how to undo it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weakincentives.cli.common import (
    AsJson,
    Misuse,
    RunOption,
    Workspace,
    complete_calls,
    diff_style,
    echo,
    examples,
    existing_directory,
    find_run,
    open_workspace,
    say,
    shortened,
    summary_of,
)
from weakincentives.cli.doctor import was_killed
from weakincentives.text import harmless

if TYPE_CHECKING:
    from weakincentives.filesystem import FileChange
    from weakincentives.runtime.calls import Call, Calls, Run

_PAGE = 'In the documentation: "History and undo".'
_SEE = "`wink log` lists the calls"
_LOG_EXAMPLES = examples(
    "wink log                      # the last calls, and what each changed",
    "wink log --run k3f -n 0       # all calls of one run",
    "wink log --json | jq .tool",
    more=f"Works while an agent is running. {_PAGE}",
)
_SHOW_EXAMPLES = examples(
    "wink show k3f/2               # the second call of the run that ends in k3f",
    "wink show 2                   # the second call of the last run",
    more=_PAGE,
)
_DIFF_EXAMPLES = examples(
    "wink diff                     # the last call that changed files",
    "wink diff k3f/2",
    "wink diff --run k3f | git apply --reverse",
    more=_PAGE,
)
_UNDO_EXAMPLES = examples(
    "wink undo                     # the last change; again: the one before",
    "wink undo k3f/2               # just this call",
    "wink undo --to k3f/2          # this call and everything after it",
    "wink undo --run k3f --dry-run",
    "wink undo undo_7              # undo an undo",
    more=f"Only files are undone, not the session of the run. {_PAGE}",
)

CallName = Annotated[
    str | None,
    typer.Argument(
        metavar="CALL",
        help="RUN/N, N of the last run, or the id of a call.",
        autocompletion=complete_calls,
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    app.command("log", epilog=_LOG_EXAMPLES)(log)
    app.command("show", epilog=_SHOW_EXAMPLES)(show)
    app.command("diff", epilog=_DIFF_EXAMPLES)(diff)
    app.command("undo", epilog=_UNDO_EXAMPLES)(undo)


def log(
    workspace: Workspace = Path(),
    run: RunOption = None,
    count: Annotated[
        int, typer.Option("-n", metavar="N", min=0, help="How many calls; 0 shows all.")
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """List the calls on a directory, their outcomes, and what they changed."""
    calls = _calls(workspace)
    only = None if run is None else find_run(calls.workspace, run)
    found = calls.latest(count or None, only)
    for sentence in (*calls.history.damaged(), *calls.damage()):
        say(sentence)
    if as_json:
        for call in found:
            echo(json.dumps(_summary(call)))
        return
    if not found:
        echo(f"No calls yet in {calls.workspace}. Start with: wink run ...", err=True)
    _print(_log_lines(found, calls.names()))


def show(call: CallName, workspace: Workspace = Path(), as_json: AsJson = False) -> None:
    """Show one call: arguments, result, why it was denied, what it changed."""
    calls = _calls(workspace)
    (found,) = calls.with_files([_find(calls, str(call))])
    if as_json:
        echo(json.dumps({**_summary(found), **_details(found)}))
    else:
        _print(_detail_lines(found))


def diff(call: CallName = None, workspace: Workspace = Path(), run: RunOption = None) -> int:
    """Show what a call or a run changed in files, as a diff for `git apply`."""
    calls = _calls(workspace)
    chosen = _chosen(calls, call, run)
    committed = [each.committed for each in chosen if each.committed is not None]
    if not committed:
        say(f"no files were changed here, or the history no longer has them; {_SEE}")
        return 1
    _print_diff(calls.history.diff(committed))
    later = [path for path, by in calls.history.changed_since(committed).items() if not by]
    if later and was_killed(calls.workspace):
        say(_KILLED)
    elif later:
        say(f"these files have changed since, outside wink (not shown): {', '.join(later)}")
    return 0


def undo(
    call: CallName = None,
    workspace: Workspace = Path(),
    run: RunOption = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="CALL",
            help="Undo this call and everything after it.",
            autocompletion=complete_calls,
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace later changes, too; the history still has them."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would change.")
    ] = False,
) -> int:
    """Undo what a call or a run changed in files. An undo can be undone, too."""
    if sum(each is not None for each in (call, run, to)) > 1:
        raise Misuse("name only one of CALL, --run and --to")
    calls = _calls(workspace)
    killed = was_killed(calls.workspace)
    if killed and not dry_run:
        calls = _recovered(calls)
    chosen = _from(calls, to) if to is not None else _chosen(calls, call, run)
    left = [each for each in chosen if each.committed and (to is not None or not each.is_undone)]
    if not left:
        say(f"nothing to undo: no files were changed here, or it is already undone; {_SEE}")
        return 1
    committed = [each.committed for each in left if each.committed is not None]
    if killed and dry_run:
        say(_KILLED)  # the killed call's changes may be in the way
    elif not force and (in_the_way := calls.history.changed_since(committed)):
        return _refuse(calls, in_the_way, left)
    if dry_run:
        _print_diff(calls.history.diff(committed, reverse=True))
        return 0
    return _undo(calls, left, force=force)


# Choosing calls


def _calls(workspace: Path) -> Calls:
    from weakincentives.runtime.calls import Calls

    return Calls(existing_directory(workspace))


def _find(calls: Calls, wanted: str) -> Call:
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


def _numbered(calls: Calls, run: Run, number: str) -> Call:
    from weakincentives.errors import SnapshotError

    try:
        found = calls.of_run(run)
    except (OSError, SnapshotError) as error:
        raise Misuse(f"cannot read the run {run.id}: {error}") from error
    for call in found:
        if str(call.number) == number:
            return call
    raise Misuse(f"the run {run.id} has {len(found)} calls; there is no call {number}")


def _chosen(calls: Calls, call: str | None, run: str | None) -> list[Call]:
    """Return a call, those of a run, or the last that changed files and is not undone."""
    if call is not None and run is not None:
        raise Misuse("name a call or a run, not both")
    if call is not None:
        return [_find(calls, call)]
    if run is not None:
        return calls.latest(None, find_run(calls.workspace, run))
    return [each for each in calls.changed() if not each.is_undone and not each.undoes][-1:]


def _from(calls: Calls, first: str) -> list[Call]:
    """Return a call and all after it, undone or not: the files go back step by step."""
    committed = _find(calls, first).committed
    if committed is None:
        raise Misuse(f"{first} changed no files; {_SEE}")
    return [
        call
        for call in calls.changed()
        if call.committed is not None and call.committed.serial >= committed.serial
    ]


# Undoing

_KILLED = (
    "a call was killed, and its changes are still there (not shown); the next command that opens "
    "the directory, such as `wink undo`, rolls it back first"
)


def _recovered(calls: Calls) -> Calls:
    """Roll back a killed call, and read the history again."""
    with open_workspace(calls.workspace) as files:
        left = files.recovered
    say("a call was killed; its changes were rolled back first")
    for sentence in left:
        say(sentence)
    return _calls(calls.workspace)


def _undo(calls: Calls, chosen: Sequence[Call], *, force: bool) -> int:
    from weakincentives.errors import UndoRefused
    from weakincentives.filesystem import WorkspaceHistory

    with open_workspace(calls.workspace) as files:
        for sentence in files.recovered:
            say(sentence)
        before = files.history()
        try:
            notes = files.undo(*(each.call_id for each in chosen), force=force)
        except UndoRefused as error:  # changed at this very moment
            return _refuse(calls, error.paths, chosen)
        except OSError as error:
            say(f"nothing was undone: {error.strerror or error}")
            return 1
        is_changed = files.history() != before
    for sentence in notes:
        say(sentence)
    if not is_changed:
        say("nothing was undone")
        return 1
    done = next(WorkspaceHistory(calls.workspace).changes())
    names = ", ".join(f"{each.name} {each.tool}".strip() for each in chosen)
    _print([[(f"Undone: {names}", "bold")], *map(_changed, done.files)])
    echo(f"To redo it: wink undo {done.call.call_id}")
    if any(each.run is not None for each in chosen):
        echo("Only files were undone; the session of the run still has the call.")
    return 0


def _refuse(calls: Calls, paths: Mapping[str, Sequence[str]], chosen: Sequence[Call]) -> int:
    names = calls.names()
    say("nothing was undone: these files have changed since:")
    for path, by in paths.items():
        who = ", ".join(names.get(each, each) for each in by) or "someone else, outside wink"
        echo(f"  {harmless(path)}: changed by {who}", err=True)
    if any(paths.values()):
        echo(f"Undo all of these calls with: wink undo --to {chosen[0].name}", err=True)
    echo("Use --force to replace them anyway; the history keeps what they hold now.", err=True)
    return 1


# Output

Line = Sequence[tuple[str, str]]
"""Pieces of text, each with a style."""
_STYLES = {
    "committed": "green",
    "ok": "",
    "undo": "cyan",
    "undone": "dim",
    "dry run": "dim",
    "denied": "yellow",
    "refused": "yellow",
    "rolled back": "red",
    "suspended": "yellow",
}


def _summary(call: Call) -> dict[str, object]:
    return {
        "call": call.name,
        "call_id": call.call_id,
        "run": None if call.run is None else call.run.id,
        "time": call.time,
        "tool": call.tool,
        "arguments": call.arguments,
        "outcome": call.outcome,
        "nested_in": None if call.outer is None else call.outer.name,
        "files": [
            {"path": f.path, "origin": f.origin, "added": f.added, "removed": f.removed}
            for f in call.files
        ],
        "undoes": list(call.undoes),
    }


def _details(call: Call) -> dict[str, Any]:
    from weakincentives.runtime.calls import plain

    if call.record is None:
        return {}
    record, metadata = call.record, call.result["metadata"]["fields"]
    return {
        "result": call.shown,
        "duration": record["duration"],
        "attempts": max(record["attempts"], metadata["attempts"]),
        "denied_by": record["denied_by"],
        "notes": plain(record["notes"]),
        "conflicts": plain(record["conflicts"]),
        "failure": plain(call.result["failure"]),
        "rolled_back": plain(metadata["undone"]),
        "not_rolled_back": plain(metadata["not_undone"]),
        "degraded": plain(metadata["degraded"]),
    }


def _log_lines(calls: Sequence[Call], names: Mapping[str, str]) -> Iterable[Line]:
    from weakincentives.runtime.calls import plain

    name = max((len(call.name) for call in calls), default=0)
    tool = max((len(_tool(call)) for call in calls), default=0)
    run: Run | None = None
    for call in calls:
        if call.run is not run and call.run is not None:
            moment = _local(call.run.data.began).strftime("%Y-%m-%d %H:%M")
            title = shortened(call.run.title, 60)
            yield [(call.run.id, "bold cyan"), (f"  {moment}  ", "dim"), (title, "italic")]
        run = call.run
        moment = _local(call.time).strftime("%H:%M:%S" if call.run else "%Y-%m-%d %H:%M:%S")
        undoes = ", ".join(names.get(each, each) for each in call.undoes)
        yield [
            (f"{call.name:>{name}}  ", "bold"),
            (f"{moment}  ", "dim"),
            (f"{_tool(call):<{tool}}  ", ""),
            (f"{call.outcome:<11}  ", _STYLES[call.outcome]),
            (summary_of(call.arguments, 50) or (undoes and f"of {undoes}"), ""),
        ]
        indent = " " * (name + 2)
        for change in call.files:
            yield [(indent, ""), *_changed(change)]
        if call.outcome in ("denied", "refused", "rolled back"):
            message = str(plain(call.result.get("message", "")))
            yield [(f"{indent}  {shortened(message, 90)}", "dim")]


def _changed(change: FileChange) -> Line:
    origin = f"{harmless(change.origin)} -> " if change.origin else ""
    return [
        (f"  {origin}{harmless(change.path)} ", ""),
        (f"+{change.added}", "green" if change.added else "dim"),
        (" ", ""),
        (f"-{change.removed}", "red" if change.removed else "dim"),
    ]


def _tool(call: Call) -> str:
    return harmless(call.tool) or ("undo" if call.undoes else "(no tool)")


def _detail_lines(call: Call) -> Iterable[Line]:
    details = _details(call)
    took = f", took {details['duration']:.3f} s" if details else ""
    attempts = details.get("attempts", 1)
    fields = {
        "call": f"{call.name}  ({call.call_id})",
        "run": "" if call.run is None else f"{call.run.id}  {call.run.title}",
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
        yield from map(_changed, call.files)
        yield [(f"  wink diff {call.name}; wink undo {call.name}", "dim")]
    elif call.committed is None and call.outcome == "ok":
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


def _print_diff(changes: Iterable[FileChange]) -> None:
    if not sys.stdout.isatty():  # byte for byte, for `git apply`
        text = "".join(change.text for change in changes)
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
        return
    lines = (line for change in changes for line in change.text.split("\n")[:-1])
    _print([(line, diff_style(line))] for line in lines)


def _local(moment: float) -> datetime:
    return datetime.fromtimestamp(moment)
