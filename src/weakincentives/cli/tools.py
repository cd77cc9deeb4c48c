"""`wink tools` and `wink policy`: the tools of an agent, and the rules for its calls."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weakincentives.cli.common import FILE_NAME, Misuse, echo, examples, find_run, hint
from weakincentives.cli.options import AsJson, Policy, RunOption, Workspace, Yes, complete_tools
from weakincentives.core.text import harmless
from weakincentives.errors import InvalidArguments, SnapshotError

if TYPE_CHECKING:
    from weakincentives.cli.config import Settings
    from weakincentives.cli.workbench import Workbench
    from weakincentives.prompt.prompt import OfferedTool
    from weakincentives.runtime import Session


@examples(
    "wink tools                    # all tools, with their reach",
    "wink tools edit_file          # its parameters, examples and policies",
    "wink tools --json | jq .name",
    more="wink.toml selects the tools.",
)
def tools(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Show only this tool, in full.",
            autocompletion=complete_tools,
            show_default=False,
        ),
    ] = None,
    workspace: Workspace = Path(),
    as_json: AsJson = False,
) -> None:
    """List the tools that an agent gets on a directory."""
    from weakincentives.cli.config import load_settings
    from weakincentives.cli.workbench import preview

    with preview(load_settings(workspace)) as workbench:
        offers = workbench.offers
        chosen = list(offers.values()) if name is None else [_named(offers, name)]
        if as_json:
            for offer in chosen:
                names = [policy.name for policy in offer.policies]
                more = {"reach": offer.tool.reach, "policies": names}
                echo(json.dumps({**offer.tool.definition(), **more}))
        elif name is None:
            width = max((len(name) for name in offers), default=0)
            for offer in chosen:
                tool = offer.tool
                words = harmless(tool.description)
                echo(f"{tool.name:<{width}}  {tool.reach or 'unstated':<12}  {words}")
        else:
            _show(chosen[0])


@examples(
    "wink policy check                  # is wink.toml valid? which policies apply?",
    'wink policy check write_file \'{"path": ".env", "content": ""}\'',
    'wink policy check edit_file \'{"path": "a.py", ...}\' --run k3f',
    more="Exit code 0: allowed; 1: denied; 2: wrong use. Nothing is run or changed.",
)
def check(
    tool: Annotated[
        str | None,
        typer.Argument(
            metavar="TOOL",
            help="A tool; without it, list the policies in force.",
            autocompletion=complete_tools,
            show_default=False,
        ),
    ] = None,
    arguments: Annotated[
        str, typer.Argument(metavar="ARGUMENTS", help="Its arguments, as JSON.", show_default=False)
    ] = "{}",
    workspace: Workspace = Path(),
    policy: Policy = None,
    run: RunOption = None,
    as_json: AsJson = False,
) -> int:
    """Tell whether a call would be allowed.

    And which policy denies it. Nothing is run. With --run, policies know what that run has read
    and called.
    """
    from weakincentives.cli.config import load_settings
    from weakincentives.cli.workbench import preview

    settings = load_settings(workspace, policy=policy)
    session = None if run is None else _session_of(settings, run)
    with preview(settings, session) as workbench:
        offers = workbench.offers
        if tool is None:
            _list_policies(settings, offers.values(), as_json=as_json)
            return 0
        offer = _named(offers, tool)
        denial, notes = _verdict(offer, _parsed(offer, arguments), workbench)
    if as_json:
        answer = {"tool": tool, "allowed": denial is None, "denied_by": denial, "notes": notes}
        echo(json.dumps(answer))
        return 0 if denial is None else 1
    for note in notes:
        echo(harmless(note))
    verdict = "is allowed." if denial is None else f"is denied by {denial}"
    echo(harmless(f"{tool} {verdict}"))
    return 0 if denial is None else 1


@examples(
    "wink policy trust                # shows the files that wink.toml names, and asks",
    "wink policy trust --yes -w DIR   # in a script of your own",
)
def trust(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE",
            help="More files that this code loads, if its imports do not show it.",
            show_default=False,
        ),
    ] = None,
    workspace: Workspace = Path(),
    yes: Yes = False,
) -> int:
    """Trust the code that a directory's settings name.

    It runs outside the sandbox. You are asked again after every change to it.
    """
    from weakincentives.cli.config import load_settings
    from weakincentives.cli.trust import APPROVE, is_interactive, trust_of

    settings = load_settings(workspace)
    for each in files or ():
        if not each.is_file():
            raise Misuse(f"there is no file {each}")
    approvals = trust_of(settings.workspace)
    found = approvals.missing(settings, files or ())
    if not found:
        echo("There is nothing to trust.")
        return 0
    for each in found:
        echo(str(each))
    if not yes and not is_interactive():
        raise Misuse("there is no terminal to ask at; review these files, then add --yes")
    if not yes and not typer.confirm(APPROVE):
        return 1
    approvals.approve(found)
    echo("Trusted until they change.")
    return 0


def _named(offers: Mapping[str, OfferedTool], name: str) -> OfferedTool:
    if name in offers:
        return offers[name]
    near = hint(name, offers, "`wink tools` lists them", cutoff=0.5)
    raise Misuse(f"there is no tool {name!r} with these settings; {near}")


def _session_of(settings: Settings, run: str) -> Session:
    from weakincentives.cli.workbench import load_types
    from weakincentives.runtime import SavedSessionData, Session

    found = find_run(settings.workspace, run)
    try:
        load_types(settings)
        return Session.from_snapshot(SavedSessionData.read(found.path).snapshot())
    except (OSError, SnapshotError) as error:
        raise Misuse(f"cannot read the run {found.id}: {error}") from error


def _parsed(offer: OfferedTool, arguments: str) -> object:
    try:
        return offer.tool.parse(json.loads(arguments))
    except InvalidArguments as error:
        raise Misuse(f"invalid arguments for {offer.tool.name}: {error}") from error
    except (ValueError, RecursionError) as error:
        example = json.dumps(dict.fromkeys(offer.tool.parameters.get("required", ()), "..."))
        raise Misuse(f"the arguments are not JSON: {error}; such as '{example}'") from error


def _verdict(
    offer: OfferedTool, params: object, workbench: Workbench
) -> tuple[str | None, list[str]]:
    """Return the policy that denies a call with its reason, or None; and notes."""
    from weakincentives.prompt import ToolContext
    from weakincentives.runtime import ToolCall, ToolInvoked
    from weakincentives.runtime.hosted import admit

    prompt, session = workbench.prompt, workbench.session
    context = ToolContext(
        session=session,
        prompt=prompt,
        resources=prompt.resources,
        rendered_prompt=replace(prompt.render(session), offers=workbench.offers),
    )
    admission = admit(ToolCall(offer.tool.name, params), context)
    if admission.request is not None:
        return None, [f"{admission.request.policy_name}: needs approval"]
    record = session[ToolInvoked].latest()
    if admission.result is None or record is None:
        return None, []
    return f"{record.denied_by or 'the tool'}: {admission.result.message}", []


# Output


def _show(offer: OfferedTool) -> None:
    from weakincentives.prompt.approval import REACHES

    tool, reach = offer.tool, offer.tool.reach or "unstated"
    echo(f"{tool.name}: {harmless(tool.description)}\n")
    echo(f"Reach: {reach} ({REACHES[reach]})")
    echo(f"Policies: {', '.join(policy.name for policy in offer.policies) or 'none'}")
    echo(f"Parameters:\n{_indented(tool.parameters)}")
    for example in tool.definition().get("examples", ()):
        echo(f"Example: {harmless(example['description'])}\n{_indented(example['input'])}")


def _indented(value: object) -> str:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return "\n".join(f"  {line}" for line in text.split("\n"))


def _list_policies(settings: Settings, offers: Collection[OfferedTool], *, as_json: bool) -> None:
    file = settings.workspace / FILE_NAME
    if not as_json:
        echo(f"{file}: {'valid' if file.exists() else 'no such file; using the defaults'}")
    governed: dict[str, list[str]] = {}
    purposes: dict[str, str] = {}
    approved: dict[str, Sequence[object]] = {}
    for offer in offers:
        for policy in offer.policies:
            governed.setdefault(policy.name, []).append(offer.tool.name)
            document = type(policy.policy).__doc__ or ""
            purposes[policy.name] = " ".join(document.strip().split("\n\n")[0].split())
            approved[policy.name] = getattr(policy.policy, "approved", ())
    for name, names in governed.items():
        if as_json:
            rules = [str(rule) for rule in approved[name]]
            more = {"purpose": purposes[name], "tools": names, "approved": rules}
            echo(json.dumps({"policy": name, **more}))
            continue
        which = "all tools" if len(names) == len(offers) else ", ".join(names)
        echo(f"{name}: {purposes[name]}" if purposes[name] else name)
        echo(f"  applies to {which}")
        for rule in approved[name]:
            echo(f"  approves without asking: {rule}")
