"""Draws docs/plots/*.svg and writes the table of docs/performance.md, from what was measured.

`make bench` ends with it; a test compares what it makes with what is there.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
BENCHMARKS = HERE.parent / "benchmarks"
NOT_TESTED = "\N{EN DASH}"
START, END = "<!-- table: written by draw_performance.py -->", "<!-- end of table -->"

OURS, OTHERS = "#0b6e4f", "#9aa8a6"


def main() -> None:
    """Draw everything again."""
    results = json.loads((BENCHMARKS / "results.json").read_text())
    for name, picture in plots(results).items():
        (HERE / "plots" / name).write_text(picture)
    page = HERE / "performance.md"
    page.write_text(with_table(page.read_text(), results))
    readme = HERE.parent / "README.md"
    readme.write_text(with_comparison(readme.read_text(), results))


# What is shown


def plots(results: dict) -> dict[str, str]:
    """Return every picture by the name of its file."""
    return {
        "call.svg": bars("One call, CPU time", direct_calls(results), "µs"),
        "turn.svg": bars("Each further call in one turn, CPU time", further_calls(results), "µs"),
        "import.svg": bars("Import, with a first tool defined, CPU time", imports(results), "ms"),
        "sandbox.svg": bars("A command that changes one file, wall time", sandboxes(results), "ms"),
    }


def direct_calls(results: dict) -> dict[str, float]:
    """Return ours with policies and a transaction, beside peers without either."""
    (plain,) = (row for row in _ours(results, "tool_call", "call plain") if not row["earlier"])
    (writing, *_) = _ours(results, "tool_call", "call writing")
    ours = {
        "WINK: transaction, two policies": plain["over_bare"],
        "WINK: the same, writing a file": writing["over_bare"],
    }
    return ours | _peers(results, "direct", "cpu")


def further_calls(results: dict) -> dict[str, float]:
    """Return what one more call in a turn costs."""
    turn = {row["kind"]: row for row in _ours(results, "turn", "turn further")}
    ours = {f"WINK, {kind}": turn[kind]["cpu"] for kind in ("async", "sync")}
    return ours | _peers(results, "further", "cpu")


def imports(results: dict) -> dict[str, float]:
    """Return how long a program takes to begin."""
    (row,) = _ours(results, "import_time", "import first tool")
    return {"WINK": row["cpu_ms"]} | _peers(results, "import names", "cpu_ms")


def sandboxes(results: dict) -> dict[str, float]:
    """Return a kept command in each sandbox, beside a bare one."""
    rows = sorted(_ours(results, "sandbox", "sandbox command"), key=lambda r: r["command"]["wall"])
    bare = {"bare subprocess": min(row["bare"]["wall"] for row in rows) / 1000}
    return bare | {f"WINK: {row['engine']}": row["command"]["wall"] / 1000 for row in rows}


def with_table(page: str, results: dict) -> str:
    """Return the page with the table of all figures that have a number to hold."""
    sys.path.insert(0, str(BENCHMARKS))
    import report

    rows = [line.strip("| ").split(" | ") for line in report.table(results).splitlines()]
    kept = [
        (what, re.sub(r" \([^()]*\)", "", ours), ratio, goal, holds)
        for what, ours, ratio, goal, holds, *_ in rows[2:]
        if goal != "-"
    ]
    head = [("what", "measured", "ratio", "number to hold", "holds?"), ("---",) * 5]
    table = "\n".join(f"| {' | '.join(row)} |" for row in [*head, *kept])
    before, rest = page.split(START)
    return f"{before}{START}\n\n{table}\n\n{END}{rest.split(END)[1]}"


def with_comparison(readme: str, results: dict) -> str:
    """Return the README with what was measured in the rows of its comparison."""
    calls, further = direct_calls(results), further_calls(results)
    others = [name for name in further if not name.startswith("WINK")]
    least, most = others[0], others[-1]
    ours = sorted(further[f"WINK, {kind}"] for kind in ("async", "sync"))
    undo = {
        row["what"]: row["roll_back"]["wall_p10"] / 1000
        for row in _rows_of_many_files(results)
        if "roll_back" in row
    }

    def shown(name: str) -> str:
        return f"{number(calls[name])} µs ({name})"

    rows = {
        "Write one file among 50,000, and roll back": (
            f"{undo['disk write']:.2f} ms", NOT_TESTED, NOT_TESTED, f"{undo['disk git']:.0f} ms",
        ),
        "One more call in a turn": (
            f"{ours[0]:.0f} to {ours[1]:.0f} µs",
            f"{number(further[least])} µs ({least}) to {number(further[most])} µs ({most})",
            NOT_TESTED,
            NOT_TESTED,
        ),
        "**Better elsewhere:** one bare call": (
            f"{calls['WINK: transaction, two policies']:.0f} µs with policies, transaction and "
            "record",
            "without any of it: "
            + ", ".join(map(shown, ("smolagents", "openai-agents", "google-adk", "pydantic-ai"))),
            f"{shown('mcp')}, {shown('fastmcp')}",
            NOT_TESTED,
        ),
    }  # fmt: skip
    for label, cells in rows.items():
        row = f"| {label} | {' | '.join(cells)} |"
        readme = re.sub(rf"^\| {re.escape(label)} \|.*$", row, readme, flags=re.MULTILINE)
    return readme


def _rows_of_many_files(results: dict) -> Iterable[dict]:
    rows = results["ours"]["disk"]["rows"]
    return (row for row in rows if row.get("files") == 50_000 and row.get("durability") != "safe")


def _ours(results: dict, script: str, what: str) -> list[dict]:
    return _rows(results["ours"][script], what)


def _rows(entry: dict, what: str) -> list[dict]:
    return [row for row in entry["rows"] if row["what"] == what]


def _peers(results: dict, what: str, figure: str) -> dict[str, float]:
    """Return each peer's best, the least first."""
    best = {
        name: min(row[figure] for row in _rows(entry, what))
        for name, entry in results["peers"].items()
        if name != "floor" and _rows(entry, what)
    }
    return dict(sorted(best.items(), key=lambda item: item[1]))


# How it is drawn

WIDTH, ROW, LABEL = 760, 30, 250


def bars(title: str, values: Mapping[str, float], unit: str) -> str:
    """Return one bar for each value; those of ours are in another colour."""
    most, height = max(values.values()), 64 + ROW * len(values)
    parts = []
    for place, (name, value) in enumerate(values.items()):
        y = 52 + place * ROW
        length = max(2, value / most * (WIDTH - LABEL - 110))
        colour = OURS if name.startswith("WINK") else OTHERS
        parts += [
            f'<text x="{LABEL - 10}" y="{y + 15}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{LABEL}" y="{y}" width="{length:.0f}" height="20" rx="3" fill="{colour}"/>',
            f'<text x="{LABEL + length + 8:.0f}" y="{y + 15}">{number(value)} {unit}</text>',
        ]
    return _svg(title, height, parts)


def number(value: float) -> str:
    """Return a figure with as many digits as it deserves."""
    return f"{value:,.0f}" if value >= 20 else f"{value:.1f}"


def _svg(title: str, height: int, parts: Iterable[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            'font-family="system-ui, sans-serif" font-size="14" fill="#1d2b2a">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{WIDTH}" height="{height}" rx="12" fill="#fff"/>',
            f'<text x="20" y="32" font-size="16" font-weight="600">{escape(title)}</text>',
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    main()
