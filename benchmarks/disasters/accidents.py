"""Ten accidents, as people have reported them of coding agents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import project


@dataclass(frozen=True, kw_only=True)
class Accident:
    """What an agent's shell does to the project."""

    name: str
    command: str
    reported: str = ""
    """Where such an accident was published, as far as we have a link."""
    prepare: Callable[[Path], None] | None = None
    later: Callable[[Path], None] | None = None
    """What the person edits before the accident is undone."""
    edited: tuple[str, ...] = ()
    """The paths of these edits."""


def _edit(root: Path) -> None:
    with (root / "src" / "app.py").open("a") as file:
        file.write("# a person's fix, after the accident\n")
    (root / "src" / "mine.py").write_text("# a person's new file\n")


ACCIDENTS = (
    Accident(
        name="`rm -rf src`",
        command="rm -rf src",
        reported="anthropics/claude-code#80830",
    ),
    Accident(
        name="`git clean -fdx`",
        command="git clean -fdx",
        reported="AndyMik90/Aperant#1477",
    ),
    Accident(
        name="`git checkout -- .` over uncommitted work",
        command="git checkout -- .",
        reported="kirodotdev/Kiro#6049",
    ),
    Accident(
        name="`sed -i` over everything",
        command="find . -type f -not -path '*/.git/*' -not -name NOTES.md"
        " -exec sed -i 's/e/E/g' {} +",
        reported="anthropics/claude-code#30718",
    ),
    Accident(name="`chmod -R 777 .`", command="chmod -R 777 ."),
    Accident(
        name="a move over a directory",
        command="mv dist/* src/ && rmdir dist",
        reported="anthropics/claude-code#49129",
    ),
    Accident(
        name="`.env` is truncated",
        command="echo API_KEY= > .env",
        reported="kirodotdev/Kiro#6465",
    ),
    Accident(name="a migration fails half-way", command="python3 scripts/migrate.py"),
    Accident(
        name="2,229 files are deleted",
        command="rm -rf assets",
        reported="anthropics/claude-code#46058",
        prepare=project.make_assets,
    ),
    Accident(
        name="an undo after a person's edits",
        command="sed -i 's/price/cost/' src/*.py",
        reported="zed-industries/zed#28676",
        later=_edit,
        edited=("src/app.py", "src/mine.py"),
    ),
)
