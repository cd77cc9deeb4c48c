"""`wink exec`: any program, also another vendor's agent, as one transaction on a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weakincentives.cli.common import examples
from weakincentives.cli.options import Policy, Workspace


@examples(
    "wink exec -- make release              # committed if it exits with 0, else rolled back",
    "wink exec --ask -- vim notes.txt       # shows the diff, then asks",
    "wink exec -w ~/project -- claude       # a coding agent: committed however it ends",
    "wink exec --checkpoint 60 -- npm run watch",
    more="The program has your terminal, and can do whatever you can: this is not a sandbox. What "
    "it does outside the directory is not rolled back. What a rollback drops is kept on a branch. "
    "The exit code is the program's; 1 if its changes were refused.",
)
def exec_program(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND...", help="The program and its arguments, after --."),
    ],
    workspace: Workspace = Path(),
    ask: Annotated[
        bool, typer.Option("--ask", help="Show the diff at the end, and ask whether to commit.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="With --ask: commit without asking.")
    ] = False,
    checkpoint: Annotated[
        float | None,
        typer.Option(
            "--checkpoint",
            metavar="SECONDS",
            min=1,
            help="Commit what changed so far at quiet moments, at most this often.",
        ),
    ] = None,
    title: Annotated[
        str, typer.Option(metavar="TEXT", help="What `wink log` shows for it.", show_default=False)
    ] = "",
    policy: Policy = None,
) -> int:
    """Run any program as one transaction.

    It is committed if the program succeeds, and rolled back if it fails.
    """
    from weakincentives.cli.execution import execute

    return execute(
        command,
        workspace,
        asks=ask,
        is_approved=yes,
        checkpoint=checkpoint,
        title=title,
        policy=policy,
    )
