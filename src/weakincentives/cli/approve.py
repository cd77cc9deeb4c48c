"""`wink approve`: answer for a run in another terminal, or without one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weakincentives.cli.common import (
    AsJson,
    Misuse,
    Workspace,
    complete_runs,
    echo,
    examples,
    existing_directory,
    find_run,
    say,
)

if TYPE_CHECKING:
    from weakincentives.prompt.approval import Approval
    from weakincentives.runtime.approvals import PendingApproval

_EXAMPLES = examples(
    'wink run "tidy up" --ask shell_execute --ask-elsewhere &',
    "wink approve                          # shows what it wants to do, and asks",
    'wink approve k3f --deny "not on main"  # the model is told why',
    "wink approve --json                   # what waits for an answer",
    more='In the documentation: "The commands".',
)
_WIDTH = 100
"""Columns of a request where there is no terminal."""


def register(app: typer.Typer) -> None:
    app.command("approve", epilog=_EXAMPLES)(approve)


def approve(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Which run; by default the only one that waits.",
            autocompletion=complete_runs,
        ),
    ] = None,
    workspace: Workspace = Path(),
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Approve what is shown without asking.")
    ] = False,
    deny: Annotated[
        str | None, typer.Option(metavar="REASON", help="Deny it; the model reads the reason.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Show what a run in progress asks about, and answer it."""
    from weakincentives.runtime.approvals import answer_approval, pending_approvals

    if yes and deny is not None:
        raise Misuse("name only one of --yes and --deny")
    directory = existing_directory(workspace)
    only = None if run is None else find_run(directory, run)
    found = [each for each in pending_approvals(directory) if only in (None, each.run)]
    if as_json:
        for each in found:
            echo(json.dumps(_as_json(each)))
        return 0
    if not found:
        raise Misuse(f"no run waits for an approval in {directory}")
    if len({each.run.id for each in found}) > 1:
        marks = ", ".join(dict.fromkeys(each.run.mark for each in found))
        raise Misuse(f"several runs wait for an approval: {marks}; name one")
    pending = found[0]
    answer = _answer(pending, yes=yes, deny=deny)
    if answer is None:
        return 1
    answer_approval(pending, approved=answer.approved, digest=pending.digest, reason=answer.reason)
    say(f"{'approved' if answer.approved else 'denied'}: {pending.request.tool_name}")
    return 0


def _as_json(pending: PendingApproval) -> dict[str, Any]:
    request = pending.request
    return {
        "run": pending.run.id,
        "id": pending.id,
        "call": request.call_id,
        "tool": request.tool_name,
        "question": request.question,
        "arguments": request.arguments,
        "diff": request.preview.diff,
        "facts": dict(request.preview.facts),
        "digest": pending.digest,
        "since": pending.since,
    }


def _answer(pending: PendingApproval, *, yes: bool, deny: str | None) -> Approval | None:
    """Show a request and return the answer; None if nobody answers."""
    from weakincentives.cli.question import ask_here, question
    from weakincentives.prompt.approval import Approval

    if not yes and deny is None and sys.stdin.isatty() and sys.stderr.isatty():
        try:
            return ask_here(pending.request, lambda: not pending.is_open)
        except EOFError as error:
            say(f"not answered: {error}" if pending.is_open else "the run no longer waits for it")
            return None
    for line in question(pending.request, width=_WIDTH, height=None).lines:
        echo(line, err=True)
    if not yes and deny is None:
        say("not answered: there is no terminal to ask at; use --yes or --deny REASON")
        return None
    return Approval(yes, reason=deny or "")
