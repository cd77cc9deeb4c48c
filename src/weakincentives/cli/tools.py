"""`wink tools` and `wink policy check`: what an agent is offered, and what it is refused."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weakincentives.cli.common import (
    FILE_NAME,
    AsJson,
    Misuse,
    Workspace,
    complete_runs,
    complete_tools,
    echo,
    examples,
    find_run,
    hint,
)
from weakincentives.text import harmless

if TYPE_CHECKING:
    from weakincentives.cli.config import Settings
    from weakincentives.cli.workbench import Workbench
    from weakincentives.prompt import Tool
    from weakincentives.prompt.policies import AttachedPolicy
    from weakincentives.prompt.prompt import Offer
    from weakincentives.runtime import Session

_TOOLS_EXAMPLES = examples(
    "wink tools                    # all of them, with how far each reaches",
    "wink tools edit_file          # its parameters, examples and policies",
    "wink tools --json | jq .name",
    more='Which there are is set in wink.toml. In the documentation: "The commands", "Policies".',
)
_APPROVE_EXAMPLES = examples(
    "wink policy approve                # shows what wink.toml names, and asks",
    "wink policy approve --yes -w DIR   # in a script that you have written",
)

_CHECK_EXAMPLES = examples(
    "wink policy check                  # is wink.toml right? what is in force?",
    'wink policy check write_file \'{"path": ".env", "content": ""}\'',
    'wink policy check edit_file \'{"path": "a.py", ...}\' --run k3f',
    more="Exit code 0: admitted; 1: denied; 2: wrong use. Nothing is run or changed.\n"
    'In the documentation: "Policies".',
)

Policy = Annotated[
    list[str] | None,
    typer.Option("--policy", help="One more rule, as `wink run` takes it. Repeat it for more."),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("tools", epilog=_TOOLS_EXAMPLES)(tools)
    policy = typer.Typer(help="Look at the policies that are in force.", no_args_is_help=True)
    policy.command("check", epilog=_CHECK_EXAMPLES)(check)
    policy.command("approve", epilog=_APPROVE_EXAMPLES)(approve)
    app.add_typer(policy, name="policy")


def tools(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Only this one, in full.",
            autocompletion=complete_tools,
            show_default=False,
        ),
    ] = None,
    workspace: Workspace = Path(),
    as_json: AsJson = False,
) -> None:
    """Show the tools that an agent gets on a directory, with the settings that hold there."""
    from weakincentives.cli.config import load_settings
    from weakincentives.cli.workbench import preview

    with preview(load_settings(workspace)) as workbench:
        offers = workbench.offers
        chosen = list(offers.values()) if name is None else [_named(offers, name)]
        if as_json:
            for offer in chosen:
                echo(json.dumps(_described(offer)))
        elif name is None:
            _list(chosen)
        else:
            _show(chosen[0])


def check(
    tool: Annotated[
        str | None,
        typer.Argument(
            metavar="TOOL",
            help="A tool; without one, the policies in force are listed.",
            autocompletion=complete_tools,
            show_default=False,
        ),
    ] = None,
    arguments: Annotated[
        str, typer.Argument(metavar="ARGUMENTS", help="Its arguments, as JSON.", show_default=False)
    ] = "{}",
    workspace: Workspace = Path(),
    policy: Policy = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            help="Ask with what a run knows: the files it has read, the calls it has made.",
            autocompletion=complete_runs,
        ),
    ] = None,
) -> int:
    """Say whether a call would be admitted now, and which policy denies it. Nothing is run."""
    from weakincentives.cli.config import load_settings
    from weakincentives.cli.workbench import preview

    settings = load_settings(workspace, policy=policy)
    session = None if run is None else _session_of(settings, run)
    with preview(settings, session) as workbench:
        offers = workbench.offers
        if tool is None:
            _list_policies(settings, offers.values())
            return 0
        offer = _named(offers, tool)
        params = _parsed(offer, arguments)
        denial, notes = _verdict(offer, params, workbench)
    for note in notes:
        echo(harmless(note))
    verdict = "is admitted." if denial is None else f"is denied by {denial}"
    echo(harmless(f"{tool} {verdict}"))
    return 0 if denial is None else 1


def approve(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE",
            help="More files that this code loads, where its text does not tell.",
            show_default=False,
        ),
    ] = None,
    workspace: Workspace = Path(),
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Approve without a question.")] = False,
) -> int:
    """Approve the settings and the code of a directory that run outside of every sandbox."""
    from weakincentives.cli.config import load_settings
    from weakincentives.cli.trust import APPROVE, is_interactive, trust_of

    settings = load_settings(workspace)
    trust = trust_of(settings.workspace)
    found = trust.missing(settings, files or ())
    if not found:
        echo("There is nothing to approve.")
        return 0
    for each in found:
        echo(str(each))
    if not yes and not is_interactive():
        raise Misuse("there is no terminal to ask at; review these files, then add --yes")
    if not yes and not typer.confirm(APPROVE):
        return 1
    trust.approve(found)
    echo("Approved until they change.")
    return 0


# What there is


def _named(offers: Mapping[str, Offer], name: str) -> Offer:
    if name in offers:
        return offers[name]
    near = hint(name, offers, "`wink tools` lists them", cutoff=0.5)
    raise Misuse(f"there is no tool {name!r} with these settings; {near}")


def _session_of(settings: Settings, run: str) -> Session:
    from weakincentives.cli.workbench import load_types
    from weakincentives.errors import SnapshotError
    from weakincentives.runtime import SavedSessionData, Session

    found = find_run(settings.workspace, run)
    try:
        load_types(settings)
        return Session.from_snapshot(SavedSessionData.read(found.path).snapshot())
    except (OSError, SnapshotError) as error:
        raise Misuse(f"the run {found.id} cannot be read: {error}") from error


# What a call would be told


def _parsed(offer: Offer, arguments: str) -> object:
    from weakincentives.errors import InvalidArguments

    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise Misuse(f"the arguments are not JSON: {error}; such as '{_example(offer)}'") from error
    try:
        return offer.tool.parse(given)
    except InvalidArguments as error:
        raise Misuse(f"{offer.tool.name} does not take these arguments: {error}") from error


def _example(offer: Offer) -> str:
    return json.dumps(dict.fromkeys(offer.tool.parameters.get("required", ()), "..."))


def _verdict(offer: Offer, params: object, workbench: Workbench) -> tuple[str | None, list[str]]:
    """Return the policy that denies and why, or None; and what else there is to say."""
    from weakincentives.prompt import ToolContext

    context = ToolContext(
        session=workbench.session, prompt=workbench.prompt, resources=workbench.prompt.resources
    )
    notes: list[str] = []
    for policy in offer.policies:
        if policy.asks_a_person:
            notes.append(f"{policy.name}: a person is asked first")
            continue
        try:
            verdict = policy.check(offer.tool, params, context=context)
            denial = policy.denial(_awaited(verdict) if policy.is_async else verdict)
        except Exception as error:  # as the pipeline does: a policy that cannot decide denies
            denial = f"it could not decide: {error!r}"
        if denial is not None:
            return f"{policy.name}: {denial}", notes
    return None, notes


def _awaited(verdict: Any) -> object:
    import asyncio

    return asyncio.run(verdict)


# What is shown


def _described(offer: Offer) -> dict[str, Any]:
    names = [policy.name for policy in offer.policies]
    return {**offer.tool.definition(), "reach": offer.tool.reach, "policies": names}


def _list(offers: Sequence[Offer]) -> None:
    name = max((len(offer.tool.name) for offer in offers), default=0)
    reach = max((len(_reach(offer.tool)) for offer in offers), default=0)
    for offer in offers:
        tool = offer.tool
        words = harmless(tool.description)
        echo(f"{tool.name:<{name}}  {_reach(tool):<{reach}}  {words}")


def _reach(tool: Tool[Any, Any]) -> str:
    return tool.reach or "unstated"


_REACHES = {
    "read": "changes nothing",
    "reversible": "what it does is rolled back if it fails, and can be undone",
    "compensable": "reaches outside, and has a way to take that back",
    "irreversible": "reaches outside, and cannot be taken back",
    "unstated": "rolled back as far as that can be",
}


def _show(offer: Offer) -> None:
    tool, reach = offer.tool, _reach(offer.tool)
    echo(f"{tool.name}: {harmless(tool.description)}\n")
    echo(f"Reach: {reach} ({_REACHES[reach]})")
    names = ", ".join(policy.name for policy in offer.policies)
    echo(f"Policies that watch it: {names or 'none'}")
    echo(f"Parameters:\n{_indented(tool.parameters)}")
    for example in tool.definition().get("examples", ()):
        echo(f"Example: {harmless(example['description'])}\n{_indented(example['input'])}")


def _indented(value: object) -> str:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return "\n".join(f"  {line}" for line in text.split("\n"))


def _list_policies(settings: Settings, offers: Collection[Offer]) -> None:
    file = settings.workspace / FILE_NAME
    echo(f"{file}: {'valid' if file.exists() else 'there is none; the defaults hold'}")
    watched: dict[str, list[str]] = {}
    described: dict[str, AttachedPolicy] = {}
    for offer in offers:
        for policy in offer.policies:
            watched.setdefault(policy.name, []).append(offer.tool.name)
            described[policy.name] = policy
    for name, names in watched.items():
        which = "all tools" if len(names) == len(offers) else ", ".join(names)
        purpose = _purpose(described[name].policy)
        echo(f"{name}: {purpose}" if purpose else name)
        echo(f"  watches {which}")


def _purpose(policy: object) -> str:
    text = (type(policy).__doc__ or "").strip().split("\n\n")[0]
    return " ".join(text.split())
