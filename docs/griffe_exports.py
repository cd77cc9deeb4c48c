"""Tells the API reference what a package exports: what it imports as ``from x import A as A``."""

from __future__ import annotations

import ast
from typing import Any

import griffe


class Exports(griffe.Extension):
    def on_module_members(self, *, node: ast.AST | Any, mod: griffe.Module, **_: Any) -> None:
        if mod.exports is None and mod.is_init_module:
            mod.exports = [
                name.name
                for each in ast.walk(node)
                if isinstance(each, ast.ImportFrom)
                for name in each.names
                if name.asname == name.name
            ]
