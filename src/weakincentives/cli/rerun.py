"""`wink rerun`: a call once more with other arguments, another prompt or other rules."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from weakincentives.cli.branches import refusing
from weakincentives.cli.common import (
    AsJson,
    Misuse,
    Policy,
    Workspace,
    Yes,
    complete_calls,
    echo,
    examples,
    existing_directory,
    hint,
)
from weakincentives.cli.history import find_call
from weakincentives.cli.run import AskElsewhere, Model, Quiet, resume

if TYPE_CHECKING:
    from weakincentives.runtime.calls import Call

_EXAMPLES = examples(
    "wink rerun k3f/4 --set path=src/b.py        # with one other argument",
    "wink rerun k3f/4 --section your-work=my.txt # the model is asked again, with this text",
    "wink rerun k3f/4 --policy protect=src       # the same call under another rule",
    "wink branch diff m7x workspace              # how the two differ",
    more='In the documentation: "Branches".',
)


def register(app: typer.Typer) -> None:
    app.command("rerun", epilog=_EXAMPLES)(rerun)


def rerun(
    call: Annotated[
        str,
        typer.Argument(
            metavar="CALL",
            help="RUN/N, N of the last run, or the id of a call.",
            autocompletion=complete_calls,
            show_default=False,
        ),
    ],
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
    """Make a call again, changed, and continue from there on a branch.

    Everything before the call is as it was, without asking the model again. The turn stays if its
    arguments or the rules change; if only the prompt or the model does, the model is asked again.
    """
    from weakincentives.runtime.calls import Calls
    from weakincentives.runtime.forks import Change, rerun_call

    calls = Calls(existing_directory(workspace))
    found = find_call(calls, call)
    with refusing():
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
            policy=policy,
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
