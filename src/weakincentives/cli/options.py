"""The options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["AsJson", "Workspace"]

Workspace = Annotated[
    Path, typer.Option("--workspace", "-w", help="The directory to work on.", show_default=".")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]
