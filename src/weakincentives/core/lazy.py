"""Packages that load their modules on first use.

The ``__init__`` of a package lists each name once, as an import::

    load_lazily(__name__)

    if TYPE_CHECKING:
        from weakincentives.prompt.approval import Approval as Approval

A type checker reads the list as imports, ``load_lazily`` as text.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, cast


def load_lazily(package: str, *at_once: str) -> None:
    """Give a package ``__all__``, and a ``__getattr__`` that imports a listed name on first use.

    A name that is also a module of the package must be loaded ``at_once``: importing the module
    later would replace it.
    """
    module = sys.modules[package]
    source: str = cast("Any", module.__loader__).get_data(module.__file__).decode()
    words = iter(source.partition("if TYPE_CHECKING:")[2].split())
    homes: dict[str, str] = {}
    home = ""
    for word in words:
        if word == "from":
            home = next(words)
        elif word == "as":
            homes[next(words).rstrip(",")] = home

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(module, name, value)  # so that the next look-up is a plain one
        return value

    def names() -> list[str]:
        return sorted({*vars(module), *homes})

    vars(module).update(__all__=sorted(homes), __getattr__=load, __dir__=names)
    for name in at_once:
        load(name)
