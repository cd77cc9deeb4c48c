"""`wink approve`: answer for a run in another terminal, or for one that waits in a database."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from weakincentives.cli.common import Misuse, echo, examples, existing_directory, find_run, say
from weakincentives.cli.database import is_named, open_runs
from weakincentives.cli.options import (
    AsJson,
    DatabaseUrl,
    Workspace,
    complete_durable_runs,
    complete_runs,
    run_argument,
)
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.errors import NoSuchRun

if TYPE_CHECKING:
    from weakincentives.prompt.approval import Approval
    from weakincentives.runtime.approvals import PendingApproval
    from weakincentives.runtime.stores.runs import Runs, WaitingApproval

_WIDTH = 100
"""Columns of a request where there is no terminal."""
_LOOK = 1.0
"""Seconds between two looks whether a database still has the question."""


def _complete(context: typer.Context, incomplete: str) -> list[str]:
    durable = complete_durable_runs(context, incomplete)
    return list(dict.fromkeys([*complete_runs(context, incomplete), *durable]))


@examples(
    'wink run "tidy up" --ask shell_execute --ask-elsewhere &',
    "wink approve                          # shows what it wants to do, and asks",
    'wink approve k3f --deny "not on main"  # the model is told why',
    "wink approve --json                   # what waits for an answer",
    "wink approve k3f --database postgresql://wink@db/wink   # a run of `wink submit`",
)
def approve(
    run: Annotated[
        str | None, run_argument("Which run; by default the only one that waits.", _complete)
    ] = None,
    workspace: Workspace = Path(),
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Approve what is shown without asking.")
    ] = False,
    deny: Annotated[
        str | None, typer.Option(metavar="REASON", help="Deny it; the model reads the reason.")
    ] = None,
    database: DatabaseUrl = None,
    as_json: AsJson = False,
) -> int:
    """Answer what a run asks, from another terminal.

    The run is in progress here, or waits in a database.
    """
    if yes and deny is not None:
        raise Misuse("name only one of --yes and --deny")
    directory = existing_directory(workspace)
    with _all_asked(directory, run, database) as found:
        if as_json:
            for each in found:
                echo(json.dumps(each.as_json()))
            return 0
        if not found:
            place = f"{directory} or the database" if is_named(database) else directory
            raise Misuse(f"no run waits for an approval in {place}")
        if len({each.run for each in found}) > 1:
            marks = ", ".join(dict.fromkeys(each.run.rpartition("-")[2] for each in found))
            raise Misuse(f"several runs wait for an approval: {marks}; name one")
        return _settle(found[0], yes=yes, deny=deny)


@dataclass(slots=True, kw_only=True)
class _Asked:
    """A request of a run, in progress here or waiting in a database."""

    run: str
    waits: PendingApproval | WaitingApproval
    runs: Runs | None = None
    """The runs of the database, if it waits in one."""
    _looked: float = field(default_factory=SYSTEM_CLOCK.monotonic)
    _was_open: bool = True

    @property
    def is_open(self) -> bool:
        if self.runs is None:
            return cast("PendingApproval", self.waits).is_open
        if SYSTEM_CLOCK.monotonic() - self._looked > _LOOK:  # asked several times a second
            self._was_open = any(each.id == self.waits.id for each in self.runs.pending(self.run))
            self._looked = SYSTEM_CLOCK.monotonic()
        return self._was_open

    def answer(self, given: Approval) -> None:
        from weakincentives.runtime.approvals import answer_approval

        said: dict[str, Any] = {"approved": given.approved, "reason": given.reason}
        if self.runs is None:
            waits = cast("PendingApproval", self.waits)
            answer_approval(waits, digest=waits.digest, **said)
        else:  # a worker that is running, or the next one, finds the run in the queue
            self.runs.answer(self.waits.id, digest=self.waits.digest, **said)

    def as_json(self) -> dict[str, Any]:
        request = self.waits.request
        return {
            "run": self.run,
            "id": self.waits.id,
            "call": request.call_id,
            "tool": request.tool_name,
            "question": request.question,
            "arguments": request.arguments,
            "diff": request.preview.diff,
            "facts": dict(request.preview.facts),
            "digest": request.digest,
            "since": self.waits.since,
        }


@contextmanager
def _all_asked(
    directory: Path, wanted: str | None, database: str | None
) -> Generator[list[_Asked]]:
    """Yield what a run asks, or all runs of a directory and of the database, oldest first."""
    from weakincentives.runtime.approvals import pending_approvals

    with open_runs(database) if is_named(database) else nullcontext() as runs:
        found: list[_Asked] = []
        durable = None
        if runs is not None:
            try:
                durable = None if wanted is None else runs.find(wanted).id
                found += [
                    _Asked(run=each.run, waits=each, runs=runs) for each in runs.pending(durable)
                ]
            except NoSuchRun:
                if database is not None:  # named just now, so the run is there
                    raise
        if database is None and durable is None:
            only = None if wanted is None else find_run(directory, wanted).id
            found += [
                _Asked(run=each.run.id, waits=each)
                for each in pending_approvals(directory)
                if only in (None, each.run.id)
            ]
        yield sorted(found, key=lambda each: each.waits.since)


def _settle(asked: _Asked, *, yes: bool, deny: str | None) -> int:
    answer = _answer(asked, yes=yes, deny=deny)
    if answer is None:
        return 1
    asked.answer(answer)
    say(f"{'approved' if answer.approved else 'denied'}: {asked.waits.request.tool_name}")
    return 0


def _answer(asked: _Asked, *, yes: bool, deny: str | None) -> Approval | None:
    """Show a request and return the answer; None if there is none."""
    from weakincentives.cli.question import ask_here, question
    from weakincentives.prompt.approval import Approval

    if not yes and deny is None and sys.stdin.isatty() and sys.stderr.isatty():
        try:
            return ask_here(asked.waits.request, lambda: not asked.is_open)
        except EOFError as error:
            is_open = asked.is_open
            say(f"not answered: {error}" if is_open else "the run no longer waits for it")
            return None
    for line in question(asked.waits.request, width=_WIDTH, height=None).lines:
        echo(line, err=True)
    if not yes and deny is None:
        say("not answered: there is no terminal to ask at; use --yes or --deny REASON")
        return None
    return Approval(yes, reason=deny or "")
