"""What a person did wrong on the command line."""

from __future__ import annotations

__all__ = ["Misuse"]


class Misuse(Exception):
    """Wrong use of the command. Its text is one line that says what to do; `wink` exits with 2."""
