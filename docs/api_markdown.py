"""The API reference as Markdown, from the source: what the site shows, without building it.

python docs/api_markdown.py weakincentives.contrib.databases
python docs/api_markdown.py                # every public module
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

DOCS = Path(__file__).parent
DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)


def public_modules() -> list[str]:
    """Return the modules of the reference, as its pages have them."""
    pages = sorted((DOCS / "api").glob("*.md"))
    return [name for page in pages for name in DIRECTIVE.findall(page.read_text("utf-8"))]


class Reference:
    """The public names of the library, read from its source."""

    def __init__(self) -> None:
        extensions = griffe.load_extensions(str(DOCS / "griffe_exports.py"))
        self._package = griffe.load(
            "weakincentives",
            search_paths=[str(DOCS.parent / "src")],
            extensions=extensions,
            resolve_aliases=True,
        )

    def page(self, module: str) -> str:
        """Return a module's names with signatures and docstrings."""
        found: Any = self._package
        for part in module.split(".")[1:]:
            found = found.members[part]
        if found.is_function or found.is_class:
            return "\n\n".join([f"# {module}", *_described(module, found, 1)])
        parts = [f"# {module}", *_texts(found)]
        own = [name for name, each in found.members.items() if not each.is_alias and each.is_public]
        for name in sorted(map(str, found.exports or own)):
            member = found.members[name]
            if not member.is_alias and member.is_module:  # the name hides the module it is from
                member = member.members.get(name)
            if member is not None:
                parts += _described(name, member, 2)
        return "\n\n".join(parts) + "\n"


def _described(name: str, member: Any, level: int) -> Iterator[str]:
    """Yield the Markdown of a name, and of the public members of a class."""
    try:
        found = member.final_target if member.is_alias else member
    except griffe.AliasResolutionError:  # of a library that is not installed
        return
    yield f"{'#' * level} {name}"
    yield f"```python\n{_signature(name, found)}\n```"
    yield from _texts(found)
    if found.is_class:
        for inner, each in found.members.items():
            if not inner.startswith("_") and (each.is_function or each.has_docstring):
                yield from _described(f"{name}.{inner}", each, level + 1)


def _signature(name: str, found: Any) -> str:
    short = name.rpartition(".")[2]
    if found.is_function:
        said = found.signature(name=short)
        return f"{'async ' if 'async' in found.labels else ''}def {said}"
    if found.is_class:
        bases = ", ".join(str(base) for base in found.bases)
        made = found.members.get("__init__")
        lines = [f"class {short}({bases})" if bases else f"class {short}"]
        if made is not None:
            lines.append(made.signature(name=short).removesuffix(" -> None"))
        return "\n".join(lines)
    kind = f": {found.annotation}" if found.annotation is not None else ""
    value = f" = {found.value}" if found.value is not None else ""
    return f"{short}{kind}{value}"


def _texts(found: Any) -> Iterator[str]:
    if found.docstring is not None:
        text = inspect.cleandoc(found.docstring.value)
        yield re.sub(r"(?m)^>>> (?:.+\n?)+", lambda e: f"```pycon\n{e[0].rstrip()}\n```\n", text)


if __name__ == "__main__":
    reference = Reference()
    sys.stdout.write("\n".join(reference.page(each) for each in sys.argv[1:] or public_modules()))
