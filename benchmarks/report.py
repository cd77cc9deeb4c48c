"""The table and the plot, from what was measured."""

import math
import re
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

START, END = "<!-- results: written by run.py -->", "<!-- end of results -->"

TARGETS = {
    "one call": 15,
    "a call that reads": 30,
    "a call that writes": 40,
    "each further call, async": 25,
    "each further call, sync": 40,
    "a whole turn with one call": 60,
    "snapshot and rollback in memory": 20,
    "parse six fields": 3,
    "open a saved session": 10_000,
    "make a branch": 2_000,
    "rewind by 100 calls": 25_000,
    "command with overlay, over none": 1_800,
    "sandboxed command, over bare": 4_500,
    "first external call, 1,000 files": 20_000,
    "first external call, 50,000 files": 1_000_000,
    "import": 60_000,
    "import with a first tool": 120_000,
    "wink --help": 200_000,
    "wink log": 250_000,
    "wink exec -- true": 250_000,
    "one hook event": 75_000,
    "one hook event, nothing recorded": 25_000,
}
"""The numbers to hold, in µs. The only list: README.md and docs/performance.md show it."""

RATIOS = {
    "write and roll back": 1.3,
    "write and commit": 1.6,
    "safe write and commit": 2.2,
    "a turn that waits": 1.3,
    "a turn late in a run": 1.1,
    "memory of a run": 1.1,
    "MCP call": 1.1,
}
"""The multiples to hold, of the same thing without us."""

HEAD = ("what", "ours", "ratio to the bare thing", "number to hold", "holds?", "peers")


def write(results: dict, folder: Path) -> None:
    """Put the table into README.md between its markers, and the plots beside it."""
    (folder / "growth.svg").write_text(plot(results))
    (folder / "disk.svg").write_text(plot_disk(results))
    readme = folder / "README.md"
    text = readme.read_text()
    before, rest = text.split(START)
    _, after = rest.split(END)
    parts = (table(results), conditions(results), integrations(results))
    body = "\n\n".join(filter(None, parts))
    readme.write_text(f"{before}{START}\n\n{body}\n\n{END}{after}")


def table(results: dict) -> str:
    """Return all rows as a Markdown table."""
    rows = [HEAD, tuple("---" for _ in HEAD), *_rows(results)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def integrations(results: dict) -> str:
    """Return what a call costs inside each agent framework, alone and with us; empty if unknown."""
    measured = results.get("integrations", {})
    rows = [row for entry in measured.values() for row in entry["rows"]]
    if not rows:
        return ""
    lines = [
        f"A call inside another framework, CPU time of a quiet moment (p10), "
        f"{_spread(entry['date'] for entry in measured.values() if entry['rows'])}:",
        "",
        "| framework | its own tool, alone | a tool of ours | its own, covered: only reads "
        "| its own, covered: scanned |",
        "| --- | --- | --- | --- | --- |",
    ]
    kinds = ("alone_us", "with_us", "covered_read_us", "covered_scan_us")
    for row in rows:
        times = (_time(row[kind]) if kind in row else "-" for kind in kinds)
        lines.append(f"| {row['framework']} {row['version']} | {' | '.join(times)} |")
    return "\n".join(lines)


def conditions(results: dict) -> str:
    """Return when, where and with which versions the rows were measured."""
    ours = results["ours"]
    measured = [entry for entry in ours.values() if "rows" in entry]
    lines = []
    if measured:
        dates = _spread(entry["date"] for entry in measured)
        speed = [entry["reference"]["cpu"] for entry in measured]
        versions = ours["versions"]
        sources = ", ".join(sorted({entry["source"] for entry in measured}))
        lines.append(
            f"Ours: {dates}, {measured[-1]['machine']}, shared and noisy, "
            f"Python {versions['python']}, "
            f"wink-runtime {versions['wink-runtime']} (source {sources}), "
            f"pydantic {versions['pydantic']}, rpds-py {versions['rpds-py']}. A fixed piece of "
            f"plain Python took {min(speed):.1f} to {max(speed):.1f} µs between the scripts: "
            "the closer these two, the calmer the machine."
        )
    seen = {name: entry for name, entry in results["peers"].items() if entry.get("versions")}
    if seen:
        dates = _spread(entry["date"] for entry in seen.values())
        speed = [entry["reference"]["cpu"] for entry in seen.values()]
        named = ", ".join(_peer_version(name, entry) for name, entry in seen.items())
        lines.append(
            f"Peers: {dates}, the same machine, fixed piece of plain Python "
            f"{min(speed):.1f} to {max(speed):.1f} µs: {named}."
        )
    lines += [
        f"Not measured: {name}: {entry['cannot_run']}."
        for name, entry in results["peers"].items()
        if "cannot_run" in entry
    ]
    return "\n\n".join(lines)


# Rows


def _rows(results: dict) -> Iterator[tuple[str, ...]]:
    yield from _call_rows(results)
    yield from _turn_rows(results)
    yield from _run_rows(results)
    yield from _snapshot_rows(results)
    yield from _disk_rows(results)
    yield from _branch_rows(results)
    yield from _saved_rows(results)
    yield from _sandbox_rows(results)
    yield from _parse_rows(results)
    yield from _dispatch_rows(results)
    yield from _render_rows(results)
    yield from _mcp_rows(results)
    yield from _start_rows(results)
    yield from _command_line_rows(results)


def _call_rows(results: dict) -> Iterator[tuple[str, ...]]:
    for row in _ours(results, "tool_call", "call plain"):
        earlier = row["earlier"]
        peers = _predecessors(results, [row], "over_bare")
        if not earlier:
            peers = "; ".join(filter(None, (_direct_calls(results), peers)))
        what = "one call, fresh session" if not earlier else f"the same after {earlier:,} calls"
        target = TARGETS["one call"] if earlier in (0, 100_000) else None
        yield _row(what, [row], target, peers)
        if earlier == 100_000:
            what = "mean of those 100,000 calls, garbage collections and bare call included"
            yield what, _time(row["history_mean"]), "-", "-", "-", ""
    for kind, what, limit in (
        ("kept", "a call whose result a reducer keeps", None),
        (
            "writing",
            "a call that writes a file, both policies at work",
            TARGETS["a call that writes"],
        ),
        ("failing", "a call that writes, dispatches and fails: rolled back", None),
        ("reading", 'a call that only reads (`reach="read"`)', TARGETS["a call that reads"]),
    ):
        rows = _ours(results, "tool_call", f"call {kind}")
        if rows:
            after = f"; after {_counts(rows, 'earlier')} calls" if len(rows) > 1 else ""
            yield _row(f"{what}{after}", rows, limit, "")


def _turn_rows(results: dict) -> Iterator[tuple[str, ...]]:
    peers = _range(results, "further", "cpu", "µs")
    for row in _ours(results, "turn", "turn further"):
        limit = TARGETS.get(f"each further call, {row['kind']}")
        yield (
            f"each further call in one turn, {row['kind']}",
            f"**{_time(row['cpu'])}** (p10 {_time(row['cpu_p10'])}, wall {_time(row['wall'])})",
            "-",
            "-" if limit is None else f"≤ {limit} µs",
            "-" if limit is None else _holds(row["cpu"], row["cpu_p10"], limit),
            f"with a scripted model {peers}" if peers and limit is not None else "",
        )
    for row in _ours(results, "turn", "turn waiting"):
        yield (
            f"a turn of {row['calls']} calls that wait 10 ms each",
            f"**{_time(row['turn']['wall'])}** wall, {_time(row['turn']['cpu'])} CPU",
            f"{row['ratio']:g} x `asyncio.gather`",
            f"≤ {RATIOS['a turn that waits']} x",
            _holds(row["ratio"], row["ratio_p10"], RATIOS["a turn that waits"]),
            "",
        )


def _run_rows(results: dict) -> Iterator[tuple[str, ...]]:
    for row in _ours(results, "run_turns", "run time"):
        edges = (row["first"], row["last"])
        yield (
            f"a run of {row['turns']:,} turns, calls in each {row['calls']}: a turn at its start "
            "/ at its end",
            f"**{_times(edge['cpu'] for edge in edges)}** (p10 "
            f"{_times(edge['cpu_p10'] for edge in edges)}; mean of all {_time(row['mean'])})",
            f"{row['ratio']:g} x",
            f"≤ {RATIOS['a turn late in a run']} x",
            _holds(row["ratio"], row["ratio_p10"], RATIOS["a turn late in a run"]),
            "",
        )
        if row["calls"] == 1:
            first, limit = row["first"], TARGETS["a whole turn with one call"]
            yield (
                f"a whole turn with one call, scripted model, in a run of {row['turns']:,}",
                f"**{_time(first['cpu'])}** (p10 {_time(first['cpu_p10'])})",
                "-",
                f"≤ {limit} µs",
                _holds(first["cpu"], first["cpu_p10"], limit),
                "",
            )
    for row in _ours(results, "run_turns", "run further"):
        yield (
            f"each further call in one turn, in a run of {row['turns']:,}",
            f"**{_time(row['cpu'])}** (p10 {_time(row['cpu_p10'])}, wall {_time(row['wall'])})",
            "-",
            f"≤ {TARGETS['each further call, sync']} µs",
            _holds(row["cpu"], row["cpu_p10"], TARGETS["each further call, sync"]),
            _range(results, "further", "cpu", "µs"),
        )
    for row in _ours(results, "run_turns", "run memory"):
        over = row["growth"] / row["log"]
        yield (
            f"memory that a turn adds to a run of {row['turns']:,}, calls in each {row['calls']}",
            f"**{row['growth']:,} bytes**; its {row['records']:g} records hold {row['log']:,}",
            f"{over:.2f} x the log",
            f"≤ {RATIOS['memory of a run']} x",
            _holds(over, over, RATIOS["memory of a run"]),
            "",
        )


def _pace_rows(row: dict) -> Iterator[tuple[str, ...]]:
    over = row["over"]
    others = (
        f"{name.replace('_', ' ')} {_time(over[name]['wall_p10'])}"
        for name in ("bubblewrap_alone", "sandlock_command", "sandlock_copy")
        if name in over
    )
    pace = f"{_time(row['rest'] * 1e6)} of rest" if row["rest"] else "back to back"
    parts = (
        ("", over["command"], "sandboxed command, over bare", "over bare", ", ".join(others)),
        (
            ": overlay and commit",
            row["overlay_and_commit"],
            "command with overlay, over none",
            "over the same namespaces without an overlay",
            "",
        ),
    )
    for what, more, target, of, beside in parts:
        yield (
            f"a sandboxed command, {row['engine']}, {pace}{what}",
            f"**{_time(more['wall_p10'])}** p10, {_time(more['wall'])} median {of}",
            "-",
            f"≤ {_time(TARGETS[target])} more",
            _holds(more["wall"], more["wall_p10"], TARGETS[target]),
            beside,
        )


def _sandbox_rows(results: dict) -> Iterator[tuple[str, ...]]:
    starts = {row["engine"]: row for row in _ours(results, "sandbox", "sandbox start")}
    for row in _ours(results, "sandbox", "sandbox command"):
        engine, bare = row["engine"], row["bare"]["wall"]
        kept, undone = row["command"]["wall"], row["rolled_back"]["wall"]
        first, limit = _time(starts[engine]["wall"]), TARGETS["sandboxed command, over bare"]
        is_default = engine == "namespaces"
        yield (
            f"a sandboxed command that changes one file, {engine}: kept / rolled back",
            f"**{_times((kept, undone))}** wall, and {first} once to find that it works",
            f"{_time(kept - bare)} more than a bare subprocess ({_time(bare)})",
            f"≤ {_time(limit)} more" if is_default else "-",
            _holds(kept - bare, kept - bare, limit) if is_default else "-",
            "",
        )
    for row in _ours(results, "sandbox", "sandbox pace"):
        yield from _pace_rows(row)
    for engine, row in starts.items():
        if "cannot_run" in row:
            yield f"a sandboxed command, {engine}", row["cannot_run"], "-", "-", "-", ""
    bare = next(iter(_ours(results, "evaluate", "evaluate bare")), None)
    for script in ("1 + 1", "1 + 1 without isolation", "a loop of 10,000", "reads 100 files"):
        for row in _ours(results, "evaluate", f"evaluate {script}"):
            wall = row["evaluation"]["wall"]
            yield (
                f"a script in a process of its own (asteval): {script}",
                f"**{_time(wall)}** wall (p10 {_time(row['wall_p10'])})",
                "-" if bare is None else f"{wall / bare['evaluation']['wall']:.1f} x `python -c`",
                "-",
                "-",
                "",
            )


def _direct_calls(results: dict) -> str:
    floor = [row["cpu"] for row in results["peers"].get("floor", {"rows": ()})["rows"]]
    without = f"JSON, pydantic and the call alone {_time(min(floor))}" if floor else ""
    direct = _range(results, "direct", "cpu", "µs")
    frameworks = f"without transactions or policies {direct}" if direct else ""
    return "; ".join(filter(None, (without, frameworks)))


def _snapshot_rows(results: dict) -> Iterator[tuple[str, ...]]:
    for way, what in (
        ("filesystem", "snapshot and rollback in memory"),
        ("session", "the same with a session"),
    ):
        rows = _ours(results, "snapshot_memory", f"snapshot {way}")
        if rows:
            peers = _predecessors(results, rows, "over_bare")
            limit = TARGETS["snapshot and rollback in memory"]
            yield _row(f"{what}, {_counts(rows, 'files')} files", rows, limit, peers)


def _disk_rows(results: dict) -> Iterator[tuple[str, ...]]:
    for what, durability, operation, limit in (
        ("write one file and roll back", "fast", "roll_back", RATIOS["write and roll back"]),
        ("write one file and commit", "fast", "commit", RATIOS["write and commit"]),
        ('the same with `durability="safe"`, roll back', "safe", "roll_back", None),
        (
            'the same with `durability="safe"`, commit',
            "safe",
            "commit",
            RATIOS["safe write and commit"],
        ),
    ):
        rows = [
            row for row in _ours(results, "disk", "disk write") if row["durability"] == durability
        ]
        if rows:
            others = _disk_others(results, operation) if durability == "fast" else ""
            yield _disk_row(f"disk: {what}", rows, operation, limit, others)
    rows = _ours(results, "disk", "disk read")
    if rows:
        yield _disk_row("disk: read one file", rows, "read", None, "", of="open, read, close")
    rows = _ours(results, "disk", "disk command")
    if rows:
        yield _command_row("commit", "commit", rows)
        yield _command_row("roll back", "roll_back", rows)
    rows = _ours(results, "disk", "disk external")
    if rows:
        limits = {
            row["files"]: (row["first"], limit)
            for row in rows
            if (limit := TARGETS.get(f"first external call, {row['files']:,} files"))
        }
        yield (
            f"disk: the first call that starts programs of its own, {_counts(rows, 'files')} files",
            _times(row["first"] for row in rows),
            "-",
            " / ".join(f"≤ {_time(limit)} for {n:,}" for n, (_, limit) in limits.items()) or "-",
            _kept_all(limits.values()) if limits else "-",
            "",
        )
        for ending, operation in (("commit", "commit"), ("roll back", "roll_back")):
            what = f"the same, each further call, {ending}"
            yield what, _walls(rows, operation), "-", "-", "-", ""


def _branch_rows(results: dict) -> Iterator[tuple[str, ...]]:
    git = next(iter(_ours(results, "branches", "branches git")), None)
    for row in _ours(results, "branches", "branches"):
        others = "" if git is None else f"git worktree add {_time(git['worktree_add']['wall'])}"
        size = f", {row['bytes_empty']:,} bytes each"
        for what, operation, more in (
            (f"branches: make one of {row['count']}, {row['files']:,} files", "create", size),
            (
                "the same, its first change",
                "first_change",
                f", then {row['bytes_changed']:,} bytes",
            ),
            ("the same, merge one file", "merge", ""),
            ("the same, open it again", "open", ""),
        ):
            ours = _wall_of(row[operation]) + more
            if operation != "create":
                yield what, ours, "-", "-", "-", ""
                continue
            limit, seen = TARGETS["make a branch"], row[operation]
            holds = _holds(seen["wall"], seen["wall_p10"], limit)
            yield what, ours, "-", f"≤ {_time(limit)}", holds, others
    for row in _ours(results, "branches", "branches past"):
        named = ("commit", "checkout", "show") if git is not None else ()
        others = ", ".join(f"{name} {_time(git[f'shadow_{name}']['wall'])}" for name in named)
        yield (
            f"branches: read a file as of {row['calls']:,} calls ago, {row['files']:,} files",
            f"{_wall_of(row['read'])}; with opening the branch {_wall_of(row['open_and_read'])}",
            *("-", "-", "-"),
            f"shadow git: {others}" if others else "",
        )
    for row in _ours(results, "branches", "branches rewind"):
        by = " / ".join(row["back"])
        yield (
            f"rewind a run of {row['calls']:,} calls by {by}, {row['files']:,} files",
            " / ".join(f"**{_time(each['cpu_p10'])}**" for each in row["back"].values())
            + f" CPU p10 (median {' / '.join(_time(e['cpu']) for e in row['back'].values())})",
            "-",
            f"≤ {_time(TARGETS['rewind by 100 calls'])} for 100",
            _kept_all(
                (each["cpu_p10"], TARGETS["rewind by 100 calls"])
                for by, each in row["back"].items()
                if by == "100"
            ),
            "",
        )


def _saved_rows(results: dict) -> Iterator[tuple[str, ...]]:
    for store in ("file", "sqlite", "postgres"):
        for row in _ours(results, "saved_sessions", f"open {store}"):
            seen, limit = row["open"], TARGETS["open a saved session"]
            yield (
                f"open a saved session of {row['records']:,} records, {store}",
                f"**{_time(seen['cpu'])}** (p10 {_time(seen['cpu_p10'])})",
                "-",
                f"≤ {_time(limit)}",
                _holds(seen["cpu"], seen["cpu_p10"], limit),
                "",
            )


def _command_line_rows(results: dict) -> Iterator[tuple[str, ...]]:
    for row in _ours(results, "command_line", "command line"):
        limit = TARGETS[row["command"]]
        yield (
            f"`{row['command']}`" if row["command"].startswith("wink") else row["command"],
            f"**{_time(row['wall_p10'])}** wall p10 (median {_time(row['wall'])})",
            "-",
            f"≤ {_time(limit)}",
            _holds(row["wall"], row["wall_p10"], limit),
            "",
        )


def _wall_of(figures: dict) -> str:
    return f"**{_time(figures['wall_p10'])}** wall p10 (median {_time(figures['wall'])})"


def _disk_row(
    what: str,
    rows: list[dict],
    operation: str,
    limit: float | None,
    others: str,
    of: str = "the plain write and rename",
) -> tuple[str, ...]:
    """Return one line for all sizes; the target is a multiple of the plain operation."""
    held = {
        figure: all(row[operation][figure] <= (limit or 0) * row["plain"][figure] for row in rows)
        for figure in ("wall", "wall_p10")
    }
    ratios = (row[operation]["wall_p10"] / row["plain"]["wall_p10"] for row in rows)
    return (
        f"{what}, {_counts(rows, 'files')} files",
        _walls(rows, operation),
        " / ".join(f"{ratio:.1f}" for ratio in ratios) + f" x {of}",
        "-" if limit is None else f"≤ {limit:g} x",
        "-" if limit is None else _held(held),
        others,
    )


def _command_row(ending: str, operation: str, rows: list[dict]) -> tuple[str, ...]:
    more = {
        figure: [row[operation][figure] - row["plain"][figure] for row in rows]
        for figure in ("wall", "wall_p10")
    }
    return (
        f"disk: shell command that changes one file, {ending}, {_counts(rows, 'files')} files",
        _walls(rows, operation),
        f"{_times(more['wall_p10'])} more than in the same namespaces without an overlay (p10)",
        f"≤ {_time(TARGETS['command with overlay, over none'])} more",
        _held(
            {
                figure: max(times) <= TARGETS["command with overlay, over none"]
                for figure, times in more.items()
            }
        ),
        f"without an overlay {_times(row['plain']['wall_p10'] for row in rows)}",
    )


def _walls(rows: list[dict], operation: str) -> str:
    p10 = _times(row[operation]["wall_p10"] for row in rows)
    return f"**{p10}** wall p10 (median {_times(row[operation]['wall'] for row in rows)})"


def _held(held: dict[str, bool]) -> str:
    """Say whether a goal holds in every row: for medians, or for 10th percentiles at least."""
    if held["wall"]:
        return "yes"
    return "**no** (p10 yes)" if held["wall_p10"] else "**no**"


def _kept_all(pairs: Iterable[tuple[float, float]]) -> str:
    return "yes" if all(seen <= limit for seen, limit in pairs) else "**no**"


def _disk_others(results: dict, operation: str) -> str:
    """Return what git and the predecessor took for the same, by number of files."""
    found = {
        "git": _ours(results, "disk", "disk git"),
        "predecessor": _disk_predecessor(results),
    }
    return "; ".join(
        f"{name} {_times(row[operation]['wall_p10'] for row in rows)}"
        for name, rows in found.items()
        if rows
    )


def _disk_predecessor(results: dict) -> list[dict]:
    rows = results["peers"].get("predecessor-disk", {"rows": ()})["rows"]
    return [row for row in rows if row["what"] == "disk predecessor"]


def _parse_rows(results: dict) -> Iterator[tuple[str, ...]]:
    for form, what in (("dict", "parse six fields from a dict"), ("json", "… from JSON text")):
        for row in _ours(results, "parse", f"parse {form}"):
            ours, pydantic = row["parse"], f"pydantic alone {_time(row['pydantic']['cpu'])}"
            peers = _predecessors(results, [row], "parse")
            yield (
                what,
                f"**{_time(ours['cpu'])}** (p10 {_time(ours['cpu_p10'])}, "
                f"wall {_time(ours['wall'])})",
                f"{row['ratio']:g} x pydantic",
                f"≤ {TARGETS['parse six fields']} µs",
                _holds(ours["cpu"], ours["cpu_p10"], TARGETS["parse six fields"]),
                "; ".join(filter(None, (pydantic, peers))),
            )


def _dispatch_rows(results: dict) -> Iterator[tuple[str, ...]]:
    for name in ("append_all", "replace_latest", "upsert_by"):
        rows = _ours(results, "session_dispatch", f"dispatch {name}")
        if rows:
            yield (
                f"dispatch, `{name}`, on {_counts(rows, 'earlier')} events",
                " / ".join(_time(row["dispatch"]["cpu"]) for row in rows),
                "-",
                "-",
                "-",
                _predecessors(results, rows, "dispatch"),
            )


def _render_rows(results: dict) -> Iterator[tuple[str, ...]]:
    for row in _ours(results, "render", "render"):
        for name, what in (
            ("cold", "for the first time"),
            ("warm", "again"),
            ("one_changed", "again with one section more or less"),
        ):
            yield (
                f"render {row['sections']} sections, {row['tools']} tools, {what}",
                _time(row[name]["cpu"]),
                "-",
                "-",
                "-",
                "",
            )


def _mcp_rows(results: dict) -> Iterator[tuple[str, ...]]:
    rows = _ours(results, "mcp_calls", "mcp call")
    ways = {
        "stdio": "over stdio",
        "stdio 2025-11-25": "over stdio at 2025-11-25",
        "http": "over HTTP",
        "http 2025-11-25": "over HTTP at 2025-11-25",
        "memory": "in one process",
    }
    tools = {"echo": "a call that only answers", "write": "a call that writes a file"}
    for tool, way, kind in product(tools, ways, ("sync", "async")):
        where, about = ways[way], (tool, way, kind)
        found = {r["server"]: r for r in rows if _about(r) == about}
        if "ours" not in found:
            continue
        ours, sdk = found["ours"], found["mcp"]
        limit = None if way == "memory" else RATIOS["MCP call"]
        ratio, quiet = (ours[each] / sdk[each] for each in ("wall", "wall_p10"))
        others = "; ".join(
            f"{name} {_time(row['wall_p10'])} (median {_time(row['wall'])})"
            for name, row in found.items()
            if name != "ours"
        )
        yield (
            f"MCP: {tools[tool]}, {kind} tool, {where}",
            f"**{_time(ours['wall_p10'])}** wall p10 (median {_time(ours['wall'])})",
            f"{quiet:.2f} x the `mcp` server without a transaction (median {ratio:.2f} x)",
            "-" if limit is None else f"≤ {limit} x",
            "-" if limit is None else _holds(ratio, quiet, limit),
            others,
        )


def _about(row: dict) -> tuple[str, str, str]:
    return row.get("tool", "write"), row["way"], row["kind"]


def _start_rows(results: dict) -> Iterator[tuple[str, ...]]:
    for name, what, limit in (
        ("package", "`import weakincentives` over bare Python", TARGETS["import"] / 1e3),
        (
            "first tool",
            "the same with the first tool defined",
            TARGETS["import with a first tool"] / 1e3,
        ),
    ):
        for row in _ours(results, "import_time", f"import {name}"):
            cpu, least, wall = row["cpu_ms"], row["cpu_ms_p10"], row["wall_ms"]
            yield (
                what,
                f"**{cpu:.0f} ms** (p10 {least:.0f} ms, wall {wall:.0f} ms)",
                "-",
                f"≤ {limit:g} ms",
                _holds(cpu, least, limit),
                _range(results, "import names", "cpu_ms", "ms") if name == "first tool" else "",
            )
    for row in _ours(results, "size", "size"):
        yield (
            f"installed size of the core, {row['packages']} packages",
            f"**{row['mb']:.1f} MB** ({row['mb_no_bytecode']:.1f} MB without byte code)",
            "-",
            "≤ 15 MB",
            _holds(row["mb"], row["mb"], 15),
            _range(results, "size", "mb", "MB"),
        )


def _row(what: str, rows: list[dict], limit: float | None, peers: str) -> tuple[str, ...]:
    """Return one line for the same thing at growing sizes; the last has to hold."""
    last = rows[-1]
    return (
        what,
        f"**{_times(row['over_bare'] for row in rows)}** over it "
        f"(p10 {_times(_least(row) for row in rows)}, "
        f"wall {_times(row['over_bare_wall'] for row in rows)})",
        " / ".join(f"{row['ratio']:g}" for row in rows) + " x",
        "-" if limit is None else f"≤ {limit:g} µs",
        "-" if limit is None else _holds(last["over_bare"], _least(last), limit),
        peers,
    )


def _least(row: dict) -> float:
    """Return the 10th percentile of what ``over_bare`` is the median of."""
    with_us, without = row.get("call") or row["cycle"], row.get("bare") or row["write"]
    return with_us["cpu_p10"] - without["cpu_p10"]


def _holds(seen: float, least: float, limit: float) -> str:
    if seen <= limit:
        return "yes"
    return "**no** (p10 yes)" if least <= limit else "**no**"


# Looking things up


def _ours(results: dict, script: str, what: str) -> list[dict]:
    rows = results["ours"].get(script, {}).get("rows", ())
    return [row for row in rows if row["what"] == what]


def _predecessors(results: dict, rows: list[dict], figure: str) -> str:
    """Return the predecessor's figures for the same rows."""
    found = [_predecessor(results, row) for row in rows]
    if not any(found):
        return ""
    figures = [row[figure] if row else None for row in found]
    times = (figure["cpu"] if isinstance(figure, dict) else figure for figure in figures)
    return "predecessor " + " / ".join("-" if time is None else _time(time) for time in times)


def _predecessor(results: dict, like: dict) -> dict | None:
    for name, entry in results["peers"].items():
        if name.startswith("predecessor"):
            for row in entry["rows"]:
                if all(row.get(key) == like.get(key) for key in ("what", "earlier", "files")):
                    return row
    return None


def _range(results: dict, pattern: str, figure: str, unit: str) -> str:
    """Return the least and the greatest figure among the peers, each peer's best counting."""
    best: dict[str, float] = {}
    for name, entry in results["peers"].items():
        figures = [row[figure] for row in entry["rows"] if re.fullmatch(pattern, row["what"])]
        if figures and name != "floor":
            best[name] = min(figures)
    if not best:
        return ""
    least, most = min(best, key=best.__getitem__), max(best, key=best.__getitem__)
    return (
        f"{_figure(best[least], unit)} ({least}) to {_figure(best[most], unit)} ({most}), "
        f"{len(best)} peers"
    )


def _figure(value: float, unit: str) -> str:
    return _time(value) if unit == "µs" else f"{value:,.0f} {unit}"


def _time(microseconds: float) -> str:
    if microseconds >= 1e6:
        return f"{microseconds / 1e6:.1f} s"
    if microseconds >= 1e4:
        return f"{microseconds / 1e3:.0f} ms"
    if microseconds >= 1e3:
        return f"{microseconds / 1e3:.1f} ms"
    return f"{microseconds:.0f} µs" if microseconds >= 100 else f"{microseconds:.1f} µs"


def _times(microseconds: Iterable[float]) -> str:
    return " / ".join(_time(value) for value in microseconds)


def _counts(rows: list[dict], name: str) -> str:
    return " / ".join(_count(row[name]) for row in rows)


def _count(number: int) -> str:
    return f"{number // 1000}k" if number >= 1000 else str(number)


def _spread(values: Iterable[str]) -> str:
    first, *rest = sorted(set(values))
    return f"{first} to {rest[-1]}" if rest else first


def _peer_version(name: str, entry: dict) -> str:
    versions = entry["versions"]
    if name.startswith("predecessor"):
        return f"{name}: weakincentives {versions['weakincentives']} (Python {versions['python']})"
    package = {"pydantic-ai": "pydantic-ai-slim", "floor": "pydantic"}.get(name, name)
    return f"{package} {versions.get(package, '')}".strip()


# The plot

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 150, 40, 50
COLOURS = "#0b6e4f", "#b23a48", "#555", "#1f5fa8"


Lines = dict[str, list[tuple[float, float]]]
"""Points by name: how many, and the microseconds."""


def plot(results: dict) -> str:
    """Draw the cost of a call over the number of earlier ones."""
    lines = {"ours": _growth(_ours(results, "tool_call", "call plain"))}
    for name, entry in results["peers"].items():
        rows = [row for row in entry["rows"] if row["what"] == "call plain"]
        if rows:
            lines[name] = _growth(rows)
    return _svg(
        "Cost of one call over a bare one, by earlier calls in the session",
        "earlier calls",
        lines,
        # A log axis has no zero: the fresh session stands where 10 would.
        {0: 10, 1_000: 1_000, 10_000: 10_000, 100_000: 100_000},
        lowest=0,
    )


def plot_disk(results: dict) -> str:
    """Draw what it costs to change one file and roll back, over the number of files."""
    writes = [row for row in _ours(results, "disk", "disk write") if row["durability"] == "fast"]
    lines = {
        "ours, write": _rolled_back(writes),
        "ours, command": _rolled_back(_ours(results, "disk", "disk command")),
        "git": _rolled_back(_ours(results, "disk", "disk git")),
        "predecessor": _rolled_back(_disk_predecessor(results)),
    }
    return _svg(
        "Change one file of a real directory and roll back, by number of files",
        "files",
        lines,
        {files: files for files in (100, 1_000, 10_000, 50_000)},
        lowest=2,
    )


def _growth(rows: list[dict]) -> list[tuple[float, float]]:
    return [(max(row["earlier"], 10), row["over_bare"]) for row in rows]


def _rolled_back(rows: list[dict]) -> list[tuple[float, float]]:
    return [(row["files"], row["roll_back"]["wall_p10"]) for row in rows]


def _svg(title: str, below: str, lines: Lines, marks: dict[int, int], *, lowest: int) -> str:
    """Draw lines on two logarithmic axes; the one of times starts at that power of ten."""
    lines = {name: points for name, points in lines.items() if points}
    top = max((y for points in lines.values() for _, y in points), default=1.0)
    powers = range(lowest, max(lowest + 2, math.ceil(math.log10(top))) + 1)
    first, last = (math.log10(at) for at in (min(marks.values()), max(marks.values())))

    def across(number: float) -> float:
        return LEFT + (math.log10(number) - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def up(microseconds: float) -> float:
        at = max(0.0, math.log10(microseconds) - lowest) / (len(powers) - 1)
        return HEIGHT - BOTTOM - at * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{title}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">'
        f"{below}</text>",
    ]
    for power in powers:
        y = up(10**power)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_tick(10**power)}</text>'
        )
    for number, at in marks.items():
        x = across(at)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#eee"/>'
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{number:,}</text>'
        )
    for (name, points), colour in zip(lines.items(), COLOURS, strict=False):
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3.5" fill="{colour}"/>'
            for x, y in points
        ]
        x, y = points[-1]
        parts.append(
            f'<text x="{across(x) + 8:.1f}" y="{up(y) + 4:.1f}" fill="{colour}">'
            f"{name}, {_time(y)}</text>"
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _tick(microseconds: int) -> str:
    if microseconds >= 1_000_000:
        return f"{microseconds // 1_000_000} s"
    if microseconds >= 1_000:
        return f"{microseconds // 1_000} ms"
    return f"{microseconds} µs"
