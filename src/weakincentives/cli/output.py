"""The one way in which commands print text: nothing in it can act on a terminal."""

from __future__ import annotations

import typer

from weakincentives.text import harmless

__all__ = ["echo"]


def echo(text: str, *, err: bool = False) -> None:
    """Print lines. Descriptions, names and messages come from models, servers and files."""
    typer.echo(harmless(text, lines=True), err=err)
