"""Draws docs/architecture.svg and writes the lists of docs/architecture.md, from the source.

The arrows are the imports, lazy and type-only ones included; what each package is comes from the
docstring of its ``__init__``. ``make map`` runs it, and a test compares.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

import grimp

DOCS = Path(__file__).parent
SOURCE = DOCS.parent / "src" / "weakincentives"
PAGE = DOCS / "architecture.md"
PICTURE = DOCS / "architecture.svg"

ROOT = "weakincentives"
LAZY = {("prompt", "runtime"), ("tool_result", "notebooks")}
"""Imports that do not point down: calling a tool runs the pipeline, a result shows itself."""

WIDTH, BOX, ROW = 900, 40, 78
WORDS = {
    "cli": "the command wink",
    "debugger": "see a run",
    "durable": "outlive a process",
    "integrations": "other frameworks",
    "mcp": "serve, use servers",
    "testing": "for your tests",
    "contrib": "ready-made tools",
    "adapters": "models",
    "telemetry": "spans",
    "runtime": "runs what is called",
    "prompt": "what is offered",
    "resources": "bound by type",
    "filesystem": "restores files",
    "log": "what changed",
    "session": "state to roll back",
    "dbc": "require, ensure",
    "retry": "when, how often",
    "notebooks": "how results look",
    "tool_result": "what a tool returns",
    "serde": "values in and out",
    "core": "time, limits, locks",
    "errors": "the whole tree",
}
"""Two or three words for each box."""
APPLICATIONS = {"cli", "debugger", "durable", "integrations", "mcp"}

Edges = Mapping[str, set[str]]


@dataclass(frozen=True)
class Package:
    """What the docstring of a package says."""

    name: str
    is_what: str
    knows: tuple[str, ...]
    not_here: str


def main() -> None:
    edges = imports()
    PICTURE.write_text(picture(edges))
    PAGE.write_text(with_lists(PAGE.read_text()))


# From the source


@cache
def _graph() -> grimp.ImportGraph:
    return grimp.build_graph(ROOT, cache_dir=None)


def imports() -> Edges:
    """Return what each part at the top of the package imports directly."""
    graph = _graph()
    edges: dict[str, set[str]] = defaultdict(set)
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            here, there = _part(module), _part(imported)
            if here and there and here != there:
                edges[here].add(there)
                edges[there] |= set()
    return edges


def imports_of(package: str) -> set[str]:
    """Return the parts at the top that a package, such as ``contrib.tools``, imports directly."""
    graph = _graph()
    inside = f"{ROOT}.{package}"
    parts = {
        _part(imported)
        for module in graph.modules
        if module == inside or module.startswith(f"{inside}.")
        for imported in graph.find_modules_directly_imported_by(module)
        if imported != inside and not imported.startswith(f"{inside}.")
    }
    return {part for part in parts if part and part != package}


def _part(module: str) -> str:
    return module.partition(".")[2].partition(".")[0]


def packages() -> list[Package]:
    """Return all packages as their docstrings describe them."""
    found = sorted(path.parent for path in SOURCE.rglob("__init__.py"))
    return [described(each) for each in found if each != SOURCE]


def described(folder: Path) -> Package:
    """Read a package's docstring; ValueError if it lacks one of the three parts."""
    name = ".".join(folder.relative_to(SOURCE).parts)
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    found = re.fullmatch(
        r"(?P<first>.*?)(?:\n\n.*?)?\nMay know: (?P<knows>.*?)\nMust not go here: (?P<not_here>.*)",
        text,
        re.DOTALL,
    )
    if found is None:
        raise ValueError(f"{name}: say what it is, what it may know, and what must not go there")
    return Package(
        name,
        _one_line(found["first"]),
        tuple(re.findall(r"`(\w+)`", found["knows"])),
        _one_line(found["not_here"]),
    )


def _one_line(text: str) -> str:
    return " ".join(text.replace("``", "`").split()).rstrip(".")


def modules() -> list[tuple[str, str]]:
    """Return the modules at the top, each with the first line of its docstring."""
    found: list[tuple[str, str]] = []
    for path in sorted(SOURCE.glob("*.py")):
        if path.stem != "__init__":
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
            found.append((path.stem, _one_line(text.partition("\n\n")[0])))
    return found


# The page


def with_lists(page: str) -> str:
    """Return the page with its two lists as the source has them."""
    lines: list[str] = []
    for each in packages():
        knows = ", ".join(f"`{name}`" for name in each.knows)
        link = f"../src/weakincentives/{each.name.replace('.', '/')}/__init__.py"
        what = f"[`{each.name}`]({link}): {each.is_what}. *Knows* {knows}."
        lines.append(_item(f"{what} *Not here:* {each.not_here}."))
    page = _between(page, "packages", lines)
    named = [
        _item(f"[`{name}`](../src/weakincentives/{name}.py): {text}.") for name, text in modules()
    ]
    return _between(page, "modules", named)


def _item(text: str) -> str:
    return textwrap.fill(
        f"- {text}", 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _between(page: str, name: str, lines: Iterable[str]) -> str:
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, _, rest = page.partition(start)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the page has no {start.strip()} … {end}")
    return "".join([before, start, "\n", *(f"{line}\n" for line in lines), "\n", end, after])


# The picture


def picture(edges: Edges) -> str:
    """Draw a box for each part, and an arrow for each import that no longer path implies."""
    down = {part: {to for to in edges[part] if (part, to) not in LAZY} for part in edges}
    arrows = _reduced(down)
    rows = _rows(arrows)
    boxes = _boxes(rows)
    height = ROW * len(rows) + 20
    title = "The packages of WINK; each imports only from those below it"
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="14" fill="#1d2b2a" text-anchor="middle">',
        f"<title>{title}</title>",
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 10 5 0 10z" fill="#4d5c5a"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" rx="12" fill="#fff"/>',
    ]
    drawn += [
        _arrow(boxes[part], boxes[to]) for part in sorted(arrows) for to in sorted(arrows[part])
    ]
    drawn += [_arrow(boxes[part], boxes[to], is_lazy=True) for part, to in sorted(LAZY)]
    drawn += [_drawn_box(part, *boxes[part]) for part in sorted(boxes)]
    return "\n".join([*drawn, "</svg>\n"])


def _reduced(edges: Edges) -> Edges:
    """Leave out what a longer path implies."""
    reached: dict[str, set[str]] = {}

    def reach(part: str) -> set[str]:
        if part not in reached:
            reached[part] = set().union(edges[part], *(reach(to) for to in edges[part]))
        return reached[part]

    return {
        part: {to for to in edges[part] if not any(to in reach(by) for by in edges[part] - {to})}
        for part in edges
    }


def _rows(arrows: Edges) -> list[list[str]]:
    """Return the parts from top to bottom: each as near as possible to what imports it."""
    rank: dict[str, int] = {}

    def ranked(part: str) -> int:
        if part not in rank:
            rank[part] = 1 + max((ranked(to) for to in arrows[part]), default=-1)
        return rank[part]

    for part in sorted(arrows, key=ranked, reverse=True):
        above = [rank[by] for by in arrows if part in arrows[by]]
        if above:
            rank[part] = min(above) - 1
    rows: list[list[str]] = [[] for _ in range(max(rank.values()) + 1)]
    for part in sorted(rank, key=list(WORDS).index):
        rows[max(rank.values()) - rank[part]].append(part)
    return rows


Box = tuple[float, float, float]
"""The middle, the top and the width."""


def _boxes(rows: list[list[str]]) -> dict[str, Box]:
    boxes: dict[str, Box] = {}
    for number, row in enumerate(rows):
        width = min(190.0, (WIDTH - 40) / len(row) - 16)
        space = (WIDTH - 40) / len(row) if len(row) > 3 else width + 50
        left = WIDTH / 2 - space * (len(row) - 1) / 2
        for place, part in enumerate(row):
            boxes[part] = (left + place * space, 20.0 + number * ROW, width)
    return boxes


def _arrow(start: Box, end: Box, *, is_lazy: bool = False) -> str:
    style = 'stroke="#b23a48" stroke-dasharray="5 4"' if is_lazy else 'stroke="#4d5c5a"'
    if start[1] == end[1]:  # beside it
        side = 1 if start[0] < end[0] else -1
        points = (start[0] + side * start[2] / 2, start[1] + BOX / 2)
        to = (end[0] - side * end[2] / 2, end[1] + BOX / 2)
    elif start[1] > end[1]:  # upwards
        points, to = (start[0] + 70, start[1]), (end[0] + 70, end[1] + BOX)
    else:
        points, to = (start[0], start[1] + BOX), (end[0], end[1])
    if end[1] - start[1] > ROW:  # past the boxes of other rows
        to = (end[0] - end[2] / 2, end[1] + BOX / 2)
        path = f"V{to[1] - 8:.0f} q0 8 8 8 H{to[0]:.0f}"
        return (
            f'<path d="M{points[0]:.0f} {points[1]:.0f} {path}" fill="none" {style} '
            'stroke-width="1.3" marker-end="url(#tip)"/>'
        )
    middle = (points[1] + to[1]) / 2
    return (
        f'<path d="M{points[0]:.0f} {points[1]:.0f} C{points[0]:.0f} {middle:.0f} '
        f'{to[0]:.0f} {middle:.0f} {to[0]:.0f} {to[1]:.0f}" fill="none" {style} '
        'stroke-width="1.3" marker-end="url(#tip)"/>'
    )


def _drawn_box(part: str, middle: float, top: float, width: float) -> str:
    fill = "#eef4f3" if part in APPLICATIONS else "#fff"
    return (
        f'<g><rect x="{middle - width / 2:.0f}" y="{top:.0f}" width="{width:.0f}" height="{BOX}" '
        f'rx="7" fill="{fill}" stroke="#0b6e4f"/>'
        f'<text x="{middle:.0f}" y="{top + 17:.0f}" font-weight="600">{escape(part)}</text>'
        f'<text x="{middle:.0f}" y="{top + 33:.0f}" font-size="12" fill="#4d5c5a">'
        f"{escape(WORDS[part])}</text></g>"
    )


if __name__ == "__main__":
    sys.exit(main())
