"""Options that several commands have, each written once, and how a shell completes them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from weakincentives.cli.common import Misuse
from weakincentives.errors import WinkError

# Shell completion

_MOST = 50
"""How many of the newest runs or calls are offered."""


def complete_runs(context: typer.Context, incomplete: str) -> list[str]:
    from weakincentives.runtime.calls import runs_of

    with suppress(OSError, WinkError):
        runs = runs_of(_workspace(context))[: -_MOST - 1 : -1]
        return [run.id for run in runs if run.id.startswith(incomplete)]
    return []


def complete_calls(context: typer.Context, incomplete: str) -> list[str]:
    from weakincentives.runtime.calls import Calls

    with suppress(OSError, WinkError):
        known = Calls(_workspace(context), detail=lambda path: False)
        calls = reversed(known.latest(_MOST))
        return [call.name for call in calls if call.name.startswith(incomplete)]
    return []


def complete_runs_and_calls(context: typer.Context, incomplete: str) -> list[str]:
    return [*complete_runs(context, incomplete), *complete_calls(context, incomplete)]


def complete_branches(context: typer.Context, incomplete: str) -> list[str]:
    from weakincentives.filesystem import branches_of

    with suppress(OSError, WinkError):
        found = branches_of(_workspace(context))
        return [each.name for each in found if each.name.startswith(incomplete)]
    return []


def complete_durable_runs(context: typer.Context, incomplete: str) -> list[str]:
    from weakincentives.cli.database import open_runs

    named = context.params.get("database")
    with suppress(Misuse, OSError, WinkError), open_runs(named, must_exist=True) as runs:
        return [run.id for run in runs.list(limit=_MOST)[::-1] if run.id.startswith(incomplete)]
    return []


def complete_tools(incomplete: str) -> list[str]:
    from weakincentives.cli.workbench import suite_tools

    return sorted(name for name in suite_tools() if name.startswith(incomplete))


def complete_models(incomplete: str) -> list[str]:
    from weakincentives.cli.models import PROVIDERS

    names = (f"{kind}:" if each.needs_name else kind for kind, each in PROVIDERS.items())
    return [name for name in names if name.startswith(incomplete)]


def complete_suites(incomplete: str) -> list[str]:
    from weakincentives.cli.config import SUITES

    before, comma, last = incomplete.rpartition(",")
    rest = [suite for suite in SUITES if suite not in before.split(",")]
    return [f"{before}{comma}{suite}" for suite in rest if suite.startswith(last)]


def _workspace(context: typer.Context) -> Path:
    return Path(context.params.get("workspace") or os.curdir)


# Arguments


def run_argument(
    help: str,  # noqa: A002  # as typer calls it
    complete: Callable[[typer.Context, str], list[str]] = complete_runs,
) -> Any:
    """Return a RUN among the arguments of a command."""
    return typer.Argument(metavar="RUN", help=help, autocompletion=complete, show_default=False)


_NAMED_RUN = "A run: a prefix of its id, or the letters at its end."
_CALL = typer.Argument(
    metavar="CALL",
    help="RUN/N, N of the last run, or the id of a call.",
    autocompletion=complete_calls,
    show_default=False,
)
CallName = Annotated[str, _CALL]
AnyCall = Annotated[str | None, _CALL]
RunOrCall = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN|CALL",
        help="A run (a prefix of its id, the letters at its end, or its branch) or a call (RUN/N, "
        "N of the last run, or its id). By default the last run.",
        autocompletion=complete_runs_and_calls,
        show_default=False,
    ),
]
RunName = Annotated[str, run_argument(_NAMED_RUN)]
DurableRunName = Annotated[str, run_argument(_NAMED_RUN, complete_durable_runs)]
Task = Annotated[
    str, typer.Argument(metavar="TASK", help="What to do; - reads it from standard input.")
]

# Options

Workspace = Annotated[
    Path,
    typer.Option(
        "--workspace",
        "-w",
        metavar="DIR",
        help="The directory to work on; by default the current one.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the answer.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Approve everything without asking.")]
AskElsewhere = Annotated[
    bool,
    typer.Option(
        "--ask-elsewhere",
        help="Without a terminal, wait for `wink approve` or `wink debug` instead of denying.",
    ),
]
InPlace = Annotated[
    bool,
    typer.Option("--in-place", help="Lock the directory for this run."),
]
BranchName = Annotated[
    str | None,
    typer.Option(
        "--branch",
        metavar="NAME",
        help="Work on this branch, a new one by default; - names it like the run.",
        autocompletion=complete_branches,
    ),
]
NoMerge = Annotated[bool, typer.Option("--no-merge", help="Leave the changes on a branch.")]
Attach = Annotated[
    list[Path] | None,
    typer.Option(
        "--attach",
        metavar="FILE",
        help="Show the model this picture or PDF with the message. Can be repeated.",
    ),
]
RunOption = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="RUN",
        help="A run: a prefix of its id, the letters at its end, or its branch.",
        autocompletion=complete_runs,
    ),
]
Before = Annotated[bool, typer.Option("--before", help="Before the call instead of after it.")]
Everything = Annotated[
    bool,
    typer.Option("--all", "--ignored", help="Also show ignored files, and long lists in full."),
]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database",
        metavar="URL",
        help="sqlite:///FILE or postgresql://USER@HOST/NAME; by default WINK_DATABASE, the user's "
        "settings, or a file of this user.",
        show_default=False,
    ),
]
Objects = Annotated[
    str | None,
    typer.Option(
        "--objects",
        metavar="URL",
        help="Where contents of files are stored: a directory, s3://BUCKET/PREFIX, or database.",
        show_default=False,
    ),
]
Machine = Annotated[
    str | None,
    typer.Option(
        "--machine",
        metavar="NAME",
        help="The name of this machine; by default WINK_MACHINE, or that of the system.",
        show_default=False,
    ),
]

# Options that are settings

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="openai:NAME, openai-responses:NAME, litellm:PROVIDER/NAME, claude[:NAME], "
        "local[:FILE] or scripted:FILE.",
        autocompletion=complete_models,
    ),
]
Policy = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        metavar="RULE",
        help="Add a rule: protect=GLOB, deny=TOOL, quota=TOOL:N, a .toml file, or module:object. "
        "Can be repeated.",
    ),
]
Temperature = Annotated[
    str | None,
    typer.Option(metavar="T", help="How varied the answers are, 0 to 2; attempts use T,T in turn."),
]
Sandbox = Annotated[
    list[str] | None,
    typer.Option(
        "--sandbox",
        metavar="NAME",
        help="What commands run in: auto, podman, bubblewrap, namespaces, seatbelt or none. Or "
        "what they may use: read=DIR, write=DIR, env=NAME, network=HOST. Can be repeated.",
    ),
]
Ask = Annotated[
    list[str] | None,
    typer.Option(
        "--ask",
        metavar="TOOL",
        help="Ask before calls of this tool, or of this reach. Can be repeated.",
        autocompletion=complete_tools,
    ),
]


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """Options of a command that are settings, by their names there; see ``expanded``."""

    model: Model = None
    policy: Policy = None
    max_turns: Annotated[int | None, typer.Option(metavar="N", help="Limit the model's turns.")] = (
        None
    )
    max_tokens: Annotated[int | None, typer.Option(metavar="N", help="Limit the tokens.")] = None
    max_cost: Annotated[
        float | None, typer.Option(metavar="USD", help="Limit the cost, in dollars.")
    ] = None
    price: Annotated[
        str | None,
        typer.Option(
            metavar="IN/OUT", help="Dollars per million tokens, if the model's price is not known."
        ),
    ] = None
    context_window: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="The tokens the model takes, if its provider does not tell."
        ),
    ] = None
    time_limit: Annotated[float | None, typer.Option(metavar="SECONDS", help="Limit the time.")] = (
        None
    )

    def given(self) -> dict[str, Any]:
        """Return those that are given; files that they name are found from any directory."""
        from weakincentives.runtime.forks import absolute

        flags = {each.name: getattr(self, each.name) for each in fields(self)}
        flags = {name: value for name, value in flags.items() if value not in (None, [])}
        if self.model:
            flags["model"] = absolute(self.model)
        if self.policy:
            flags["policy"] = [absolute(each) for each in self.policy]
        return flags


@dataclass(frozen=True, kw_only=True)
class RunSettings(_Settings):
    """Settings of `wink run`, `resume` and `chat`."""

    sandbox: Sandbox = None
    ask: Ask = None


@dataclass(frozen=True, kw_only=True)
class SubmitSettings(_Settings):
    """Settings of `wink submit`."""

    temperature: Temperature = None
    sandbox: Sandbox = None
    ask: Ask = None


_Result = TypeVar("_Result")


def expanded(command: Callable[..., _Result]) -> Callable[..., _Result]:
    """Return a command for typer: a parameter that is a dataclass becomes one option per field."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for each in inspect.signature(command).parameters.values():
        group = groups.get(each.name)
        if group is None:
            parameters.append(each.replace(annotation=hints[each.name]))
            continue
        types = get_type_hints(group, include_extras=True)
        parameters += [
            each.replace(name=field.name, annotation=types[field.name], default=field.default)
            for field in fields(group)
        ]

    @wraps(command)
    def call(**values: Any) -> _Result:
        for name, group in groups.items():
            own = {field.name: values.pop(field.name) for field in fields(group)}
            values[name] = group(**own)
        return command(**values)

    call.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    return call
