"""Ten accidents, each done by a real agent, and undone in every way that there is.

The agent is a real program with a scripted model, where nothing but loopback can be reached.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import project  # noqa: E402
from accidents import ACCIDENTS, Accident  # noqa: E402
from ways import WAYS, Way  # noqa: E402

README = HERE.parents[1] / "README.md"
RESULTS = HERE / "results.json"


def play(accident: Accident, kind: type[Way], folder: Path) -> dict[str, Any]:
    """Return what is left of an accident once it is undone."""
    root, home = folder / "project", folder / "home"
    project.make(root)
    if accident.prepare:
        accident.prepare(root)
    way = kind(root, home)
    way.before()
    before = project.read(root)
    happened = home / "happened"
    command = f"({accident.command}); code=$?; touch {happened}; (exit $code)"
    shell = way.running.agent.shell(command)
    edit = way.running.agent.edit(str(root / project.LATER), "one", "two")
    if way.edits_by_shell:
        told = way.run([[shell], [way.running.agent.shell(f"echo two > {project.LATER}")]])
    elif way.agent == "claude":  # it edits only what it has read
        told = way.run([[("Read", {"file_path": str(root / project.LATER)})], [shell], [edit]])
    else:
        told = way.run([[shell], [edit]])
    if not happened.exists():  # else the project would be as before for no merit of the way
        raise RuntimeError(f"the agent's shell did not run: {told[-200:]}")
    damage = project.read(root)
    if accident.later:
        accident.later(root)
    edited = project.read(root)
    began = time.monotonic()
    said = way.undo()
    seconds = time.monotonic() - began
    after = project.read(root)
    # The agent's later work and the person's edits are looked at by themselves.
    own = {project.LATER, *accident.edited}
    own |= {str(Path(each).parent) for each in own}
    mine = [after.get(each) for each in accident.edited]

    def rest(items: dict[str, project.Item]) -> dict[str, project.Item]:
        return {path: item for path, item in items.items() if path not in own}

    later = root / project.LATER
    return {
        "accident": accident.name,
        "way": way.name,
        "agent": way.agent,
        "damage": project.differences(rest(before), rest(damage)),
        "left": project.differences(rest(before), rest(after)),
        "keeps later work": later.exists() and later.read_text() == "two\n",
        "keeps the person's edits": [edited.get(each) for each in accident.edited] == mine
        if accident.edited
        else None,
        "seconds": round(seconds, 2),
        "agent said": told[-600:].replace(str(folder), "…"),
        "said": said[-600:].replace(str(folder), "…"),
    }


def table(results: dict[str, Any]) -> str:
    """Return the results as a table of Markdown, and what did not run at all."""
    found = {(each["accident"], each["way"]): each for each in results["results"]}
    failed = {
        way: next(each["error"] for each in results["results"] if each["way"] == way)
        for way in results["ways"]
        if all("error" in each for each in results["results"] if each["way"] == way)
    }
    ways = [each for each in results["ways"] if each not in failed]
    shown = [f"{each} {results['ways'][each]}" for each in ways]
    lines = ["| accident | " + " | ".join(shown) + " |", "|---|" + "---|" * len(ways)]
    for accident in dict.fromkeys(each["accident"] for each in results["results"]):
        cells = [_cell(found.get((accident, way))) for way in ways]
        lines.append(f"| {accident} | " + " | ".join(cells) + " |")
    kept = [_kept([each for each in results["results"] if each["way"] == way]) for way in ways]
    lines.append("| the agent's good edit after the accident | " + " | ".join(kept) + " |")
    for way, error in failed.items():
        lines.append(f"\n{way} {results['ways'][way]} does not run on this project: {error}")
    return "\n".join(lines)


def _cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return "not run"
    if result.get("error"):
        return f"did not run: {result['error']}"
    said = project.counted(result["left"]) or "**as before**"
    if result["damage"] and result["left"] == result["damage"]:
        said = f"nothing undone: {said}"
    if result["keeps the person's edits"] is not None:
        said += "; edits kept" if result["keeps the person's edits"] else "; **edits lost**"
    return said


def _kept(results: list[dict[str, Any]]) -> str:
    kept = [each["keeps later work"] for each in results if "error" not in each]
    if len(set(kept)) == 1:
        return "kept" if kept[0] else "lost"
    return f"kept {sum(kept)} times of {len(kept)}"


def _one_per_line(results: dict[str, Any]) -> str:
    lines = [json.dumps(each) for each in results["results"]]
    head = json.dumps({**results, "results": []}, indent=1)
    return head.replace('"results": []', '"results": [\n' + ",\n".join(lines) + "\n]")


def readme(text: str, results: dict[str, Any]) -> str:
    """Return the README with the results."""
    start, end = (
        "<!-- disasters: written by benchmarks/disasters/run.py -->",
        "<!-- end of disasters -->",
    )
    before, _, rest = text.partition(start)
    after = rest.partition(end)[2]
    agents = {each["way"]: each["agent"] for each in results["results"] if "agent" in each}
    others = [f"{agent} under {way}" for way, agent in agents.items() if agent != "claude"]
    date = f"Run on {results['date']}. Claude Code did the accidents, but {' and '.join(others)}."
    return f"{before}{start}\n\n{table(results)}\n\n{date}\n\n{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="a way, by a part of its name: print only")
    parser.add_argument("--accident", type=int, help="one of them, from 1: print only")
    parser.add_argument("--print", action="store_true", help="the table of the last results")
    options = parser.parse_args()
    if options.print:
        print(table(json.loads(RESULTS.read_text())))
        return
    kinds = [each for each in WAYS if (options.only or "").lower() in each.name.lower()]
    accidents = ACCIDENTS if not options.accident else ACCIDENTS[options.accident - 1 :][:1]
    results: dict[str, Any] = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "began": f"{datetime.now(UTC):%H:%M:%S}",
        "ways": {},
        "accidents": {each.name: [each.command, each.reported] for each in accidents},
        "results": [],
    }
    for kind in kinds:
        for accident in accidents:
            folder = Path(tempfile.mkdtemp(prefix="disaster-"))
            print(f"{kind.name}: {accident.name}", end=" … ", file=sys.stderr, flush=True)
            try:
                if kind.name not in results["ways"]:
                    (folder / "v").mkdir()
                    results["ways"][kind.name] = kind(folder / "v", folder / "vh").version()
                result = play(accident, kind, folder)
            except Exception as error:  # one way that fails leaves the others
                result = {"accident": accident.name, "way": kind.name, "error": str(error)[-300:]}
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            result["ended"] = f"{datetime.now(UTC):%H:%M:%S}"
            results["results"].append(result)
            print(_cell(result), file=sys.stderr)
    if not options.accident and not options.only:  # the table is always of one run
        RESULTS.write_text(_one_per_line(results) + "\n")
        README.write_text(readme(README.read_text(), results))
    print(table(results))


if __name__ == "__main__":
    main()
