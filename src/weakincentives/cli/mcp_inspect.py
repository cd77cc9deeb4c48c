"""`wink mcp inspect`: what a server offers, and calls of its tools by hand."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from weakincentives.cli.common import Misuse, echo, examples, hint, table
from weakincentives.cli.options import AsJson
from weakincentives.core.text import harmless, visible
from weakincentives.errors import ToolDefinitionError

if TYPE_CHECKING:
    from weakincentives.mcp import HttpServer, McpToolsSection, StdioServer
    from weakincentives.prompt.approval import Approval, ApprovalRequest
    from weakincentives.prompt.tool import Tool


@examples(
    "wink mcp inspect mcp-server-git --repository .          # what it offers",
    "wink mcp inspect --oauth https://example.com/mcp        # sign in with the browser",
    "wink mcp inspect --call add --arguments '{\"a\": 1}' https://example.com/mcp",
    "wink mcp inspect --pins pins.json --approve my-server   # approve its tools as they are now",
    more="Options come before the server: what follows its name is its own.\n\n"
    "Exit code 0: it works; 1: the call failed, or with --pins a tool is not approved; 2: wrong "
    "use. The server runs as you, and a call has the effects that it has.",
)
def inspect(
    server: Annotated[
        list[str],
        typer.Argument(
            metavar="SERVER [ARG]...",
            help="A URL, or a command that speaks MCP.",
            show_default=False,
        ),
    ],
    call: Annotated[
        str | None,
        typer.Option("--call", metavar="TOOL", help="Call this tool, by its name there."),
    ] = None,
    arguments: Annotated[
        str, typer.Option("--arguments", metavar="JSON", help="With --call: its arguments.")
    ] = "{}",
    answer: Annotated[
        str | None,
        typer.Option(
            "--answer", metavar="JSON", help="What to answer if the server asks you something."
        ),
    ] = None,
    headers: Annotated[
        list[str] | None,
        typer.Option("--header", metavar="NAME:VALUE", help="Send this header to a URL."),
    ] = None,
    oauth: Annotated[
        bool, typer.Option("--oauth", help="Sign in at a URL with the browser.")
    ] = False,
    pins: Annotated[
        Path | None, typer.Option("--pins", metavar="FILE", help="Compare with approved tools.")
    ] = None,
    approve: Annotated[
        bool, typer.Option("--approve", help="With --pins: approve the tools as they are now.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what an MCP server offers, and call its tools by hand."""
    from weakincentives.mcp import McpToolsSection

    if approve and pins is None:
        raise Misuse("--approve needs --pins FILE: where the approved tools are")
    given = _object("--arguments", arguments)
    answering = _answering(None if answer is None else _object("--answer", answer))
    try:
        section = McpToolsSection(
            server=_server(server, headers or [], oauth), pins=pins, ask=answering
        )
    except ToolDefinitionError as error:
        raise Misuse(str(error)) from error
    with section:
        if approve:
            for name in section.approve():
                echo(f"approved: {harmless(name)}")
        elif call is not None:
            raise typer.Exit(_call(section, call, given, as_json=as_json))
        else:
            for line in _described(section) if not as_json else _as_json(section):
                echo(line)
            raise typer.Exit(1 if pins is not None and section.unapproved else 0)


def _server(words: list[str], headers: list[str], oauth: bool) -> HttpServer | StdioServer:
    from weakincentives.mcp import HttpServer, OAuth, StdioServer

    first, *rest = words
    if not first.startswith(("http://", "https://")):
        if headers or oauth:
            raise Misuse("--header and --oauth are for a URL; a command is started")
        return StdioServer(first, rest, cwd=Path.cwd())
    if rest:
        raise Misuse(f"a URL takes nothing after it, got {' '.join(rest)!r}; options come first")
    pairs = [each.partition(":") for each in headers]
    if any(not colon for _, colon, _ in pairs):
        raise Misuse("--header takes NAME:VALUE")
    sent = {name.strip(): value.strip() for name, _, value in pairs}
    return HttpServer(first, headers=sent, auth=OAuth() if oauth else None)


def _object(option: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise Misuse(f"{option} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise Misuse(f"{option} takes a JSON object, such as '{{\"name\": 1}}'")
    return cast("dict[str, Any]", found)


def _answering(given: Mapping[str, Any] | None) -> Callable[[ApprovalRequest], Approval]:
    from weakincentives.prompt.approval import Approval

    def ask(request: ApprovalRequest) -> Approval:
        if given is not None:
            return Approval(True, "--answer", arguments=given)
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            return Approval(False, reason="there is no terminal to ask at")
        echo(request.describe(20_000), err=True)
        said = typer.prompt(
            "The answer as JSON, empty for these values, n to decline", "", err=True
        )
        if said.strip() in ("n", "no"):
            return Approval(False, "you")
        try:
            return Approval(True, "you", arguments=_object("The answer", said) if said else None)
        except Misuse as error:
            echo(str(error), err=True)
            return Approval(False, "you")

    return ask


def _call(
    section: McpToolsSection, name: str, arguments: Mapping[str, Any], *, as_json: bool
) -> int:
    from weakincentives.runtime import ToolRegistry

    names = section.names
    if name not in names:
        known = f"its tools are {', '.join(names)}"
        raise Misuse(f"the server offers no tool {name!r}; {hint(name, names, known)}")
    with ToolRegistry.from_section(section) as tools:
        result = tools.execute(names[name], dict(arguments))
    if as_json:
        value = result.value
        shown = {"success": result.success, "text": result.render()}
        echo(json.dumps({**shown, "structured": getattr(value, "structured", None)}))
    else:
        echo(result.render())
    return 0 if result.success else 1


def _as_json(section: McpToolsSection) -> Iterator[str]:
    offered = {ours: theirs for theirs, ours in section.names.items()}
    for tool in section.tools:
        yield json.dumps({**tool.definition(), "name": offered.get(tool.name, tool.name)})


def _described(section: McpToolsSection) -> Iterator[str]:
    offered = {ours: theirs for theirs, ours in section.names.items()}
    about = section.connection.about()
    yield harmless(about.title)
    if about.instructions:
        yield visible(about.instructions)
    for title, rows in (
        ("Tools", [_row(offered.get(tool.name, tool.name), tool) for tool in section.tools]),
        ("Resources", about.resources),
        ("Prompts", about.prompts),
    ):
        if rows:
            yield f"\n{title}:"
            yield from (f"  {line}" for line in table([[harmless(c) for c in row] for row in rows]))
    if section.left_out:
        yield "\nNot offered:"
        yield from (f"  {harmless(f'{e.name}: {e.reason}')}" for e in section.left_out)
    for name, diff in section.unapproved.items():
        yield f"\n{harmless(name)} has changed since it was approved:"
        yield "\n".join(visible(line) for line in diff.splitlines())


def _row(name: str, tool: Tool[Any, Any]) -> list[str]:
    schema = tool.input_schema or {}
    required = schema.get("required", ())
    parameters = [f"{p}{'' if p in required else '?'}" for p in schema.get("properties", {})]
    first = tool.description.strip().splitlines()[0]
    return [f"{name}({', '.join(parameters)})", first[:200]]
