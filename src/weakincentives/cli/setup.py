"""`wink setup`: shell completion and manual pages, for the person who runs it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from weakincentives.cli.common import Misuse, echo, examples
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.text import counted

if TYPE_CHECKING:
    from typer.core import TyperGroup

Shell = Literal["bash", "zsh", "fish"]


@examples(
    "wink setup                    # for the shell in $SHELL",
    "wink setup --shell fish",
    "man wink-undo                 # after it, in a new shell",
    more="Completion is added to the files that your shell reads at its start. Manual pages go "
    "where `man` looks for those of the programs beside `wink`. Nothing else is changed.",
)
def setup(
    shell: Annotated[
        Shell | None,
        typer.Option(help="Which shell; by default that in $SHELL.", show_default=False),
    ] = None,
) -> None:
    """Install shell completion and manual pages."""
    from typer.completion import install  # pyright: ignore[reportPrivateImportUsage]

    named = shell or Path(os.environ.get("SHELL", "")).name
    if named not in ("bash", "zsh", "fish"):
        raise Misuse(
            f"no completion for the shell {named or '(none)'!r}; use --shell bash|zsh|fish"
        )
    _, script = install(named, "wink", "_WINK_COMPLETE")
    echo(f"completion for {named}: {script}; it works in a new shell")
    place = _manual()
    pages = dict(manual_pages())
    try:
        place.mkdir(parents=True, exist_ok=True)
        for name, text in pages.items():
            (place / name).write_text(text, "utf-8")
    except OSError as error:
        raise Misuse(f"cannot write manual pages to {place}: {error.strerror}") from error
    echo(f"{counted(len(pages), 'manual page')}: {place}; try `man wink`")


def _manual() -> Path:
    """Return where `man` finds pages: beside the directory of the program, or for this user."""
    program = shutil.which("wink")
    place = Path(program).parent.parent / "share" if program else None
    if place is None or not os.access(place if place.exists() else place.parent, os.W_OK):
        place = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return place / "man" / "man1"


def manual_pages() -> Iterator[tuple[str, str]]:
    """Yield the name and text of each page: `wink.1`, and one for each command."""
    from typer.main import get_command

    from weakincentives.cli.entry import SECTIONS, make_app

    program = cast("TyperGroup", get_command(make_app()))
    top = typer.Context(cast("Any", program), info_name="wink")
    yield "wink.1", _page(top, [("COMMANDS", _commands(program, top, SECTIONS))])
    for name, command in program.commands.items():
        context = typer.Context(command, info_name=f"wink {name}")
        inner = getattr(command, "commands", {})
        yield f"wink-{name}.1", _page(context, [])
        for word, each in inner.items():
            yield (
                f"wink-{name}-{word}.1",
                _page(typer.Context(each, info_name=f"wink {name} {word}"), []),
            )


def _commands(program: Any, context: typer.Context, sections: Any) -> str:
    parts: list[str] = []
    for section, names in sections.items():
        parts.append(f".SS {_escaped(section)}")
        for name in dict.fromkeys(each.split()[0] for each in names):
            summary = program.get_command(context, name).get_short_help_str(1000)
            parts.append(_item(f"wink-{name}(1)", summary))
    return "\n".join(parts)


def _page(context: typer.Context, more: list[tuple[str, str]]) -> str:
    from weakincentives import __version__

    command = context.command
    name = (context.info_name or "wink").replace(" ", "-")
    pieces = " ".join(command.collect_usage_pieces(context))
    records = [each.get_help_record(context) for each in command.get_params(context)]
    options = "\n".join(_item(*record) for record in records if record is not None)
    text = (command.help or "").replace("\b", "").strip()
    commands = [
        _item(word, each.get_short_help_str(1000))
        for word, each in getattr(command, "commands", {}).items()
    ]
    parts = {
        "NAME": f"{_escaped(name)} \\- {_escaped(command.get_short_help_str(1000).rstrip('.'))}",
        "SYNOPSIS": f".B {_escaped(context.info_name or '')}\n{_escaped(pieces)}",
        "DESCRIPTION": "\n.PP\n".join(_escaped(" ".join(p.split())) for p in text.split("\n\n")),
        "OPTIONS": options,
        **({"COMMANDS": "\n".join(commands)} if commands and not more else {}),
        **dict(more),
        **_ending(command.epilog or ""),
        "SEE ALSO": "wink(1)" if name != "wink" else "wink-log(1), wink-undo(1), wink-exec(1)",
    }
    today = datetime.fromtimestamp(SYSTEM_CLOCK.time())
    head = f'.TH {name.upper()} 1 "{today:%Y-%m-%d}" "wink {__version__}"'
    return "\n".join([head, *(f".SH {title}\n{body}" for title, body in parts.items() if body), ""])


def _ending(epilog: str) -> dict[str, str]:
    """Return the sections of what follows the options: examples, and notes."""
    block, _, rest = epilog.partition("\n\n")
    found: dict[str, str] = {}
    if block.startswith("\b"):
        lines = [line.strip() for line in block.split("\n")[2:]]
        found["EXAMPLES"] = "\n".join([".nf", *map(_escaped, lines), ".fi"])
    else:
        rest = epilog
    if rest.strip():
        found["NOTES"] = _escaped(" ".join(rest.split()))
    return found


def _item(term: str, text: str) -> str:
    return f".TP\n.B {_escaped(term)}\n{_escaped(' '.join(text.split()))}"


def _escaped(text: str) -> str:
    """Return a text in which nothing is a request of the formatter."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text
