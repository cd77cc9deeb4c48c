"""The types of our tools that a saved session may hold."""

from __future__ import annotations

from importlib import import_module

_MODULES = ("asteval", "digest", "planning", "sandbox.section", "file_values", "files")


def load_types() -> None:
    """Import them, so that a saved session can be opened."""
    for name in _MODULES:
        import_module(f"weakincentives.contrib.tools.{name}")
