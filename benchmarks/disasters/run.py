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
    shell = way.running.agent.shell(accident.command)
    edit = way.running.agent.edit(str(root / project.LATER), "one", "two")
    if way.edits_by_shell:
        told = way.run([[shell], [way.running.agent.shell(f"echo two > {project.LATER}")]])
    elif way.agent == "claude":  # it edits only what it has read
        told = way.run([[("Read", {"file_path": str(root / project.LATER)})], [shell], [edit]])
    else:
        told = way.run([[shell], [edit]])
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
    for way, error in failed.items():
        lines.append(f"\n{way} {results['ways'][way]} did not run: {error}")
    return "\n".join(lines)


def _cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return "not run"
    if result.get("error"):
        return f"did not run: {result['error']}"
    said = project.counted(result["left"])
    if said == "as it was":
        said = "**as it was**"
    elif result["left"] == result["damage"]:
        said = f"nothing is undone: {said}"
    if not result["keeps later work"]:
        said += "; the agent's later edit is lost"
    if result["keeps the person's edits"] is False:
        said += "; **the person's edits are lost**"
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="a way, by a part of its name")
    parser.add_argument("--accident", type=int, help="one of them, from 1")
    parser.add_argument("--print", action="store_true", help="the table of the last results")
    options = parser.parse_args()
    if options.print:
        print(table(json.loads(RESULTS.read_text())))
        return
    kinds = [each for each in WAYS if (options.only or "").lower() in each.name.lower()]
    accidents = ACCIDENTS if not options.accident else ACCIDENTS[options.accident - 1 :][:1]
    results: dict[str, Any] = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
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
            results["results"].append(result)
            print(_cell(result), file=sys.stderr)
    if not options.only and not options.accident:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
