"""Measure this checkout, and with ``--peers`` the libraries it is compared with.

    python benchmarks/run.py                     ours; peers' rows stay as last seen
    python benchmarks/run.py --peers             ours and all peers
    python benchmarks/run.py --only tool_call    one measurement, or one peer by its name
    python benchmarks/run.py --only integrations a call in each agent framework, with and without us
    python benchmarks/run.py --quick             ours, few samples; prints and writes nothing

Writes results.json, growth.svg and disk.svg, and the table in README.md.
"""

import argparse
import datetime
import json
import os
import platform
import sys

import environments as env
import report
from timing import reference

RESULTS = env.BENCHMARKS / "results.json"

OURS = {
    "tool_call": ("--quick",),
    "turn": ("--quick",),
    "run_turns": ("--quick",),
    "snapshot_memory": ("--quick",),
    "disk": ("--quick",),
    "branches": ("--quick",),
    "sandbox": ("--quick",),
    "evaluate": ("--quick",),
    "parse": ("--quick",),
    "session_dispatch": ("--quick",),
    "saved_sessions": ("--quick",),
    "render": ("--quick",),
    "mcp_calls": ("--quick",),
    "import_time": ("--quick",),
    "command_line": ("--quick",),
    "size": (),
}
"""Our scripts, and what each takes for a quick run."""
INTEGRATIONS = (
    "claude-agent-sdk",
    "google-adk",
    "langchain",
    "openai-agents",
    "pydantic-ai",
    "smolagents",
)
"""The extras of the frameworks that we run inside of."""
EXTRAS = {"command_line": "cli", "evaluate": "asteval", "mcp_calls": "mcp"}
"""What a script needs beside the core, which has an environment of its own."""


def main() -> None:
    options = _options()
    results = _read()
    ours, peers, frameworks = _chosen(options)
    if ours:
        measure_ours(results, ours, quick=options.quick)
    for framework in frameworks:
        measure_integration(results, framework)
    for peer in peers:
        measure_peer(results, peer)
    if options.quick:
        print(report.table(results))
        return
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    report.write(results, env.BENCHMARKS)
    print(report.table(results))


def measure_ours(results: dict, names: list[str], *, quick: bool) -> None:
    """Run our scripts in an environment of their own."""
    _say("installing this checkout into .bench/ours")
    source = env.source_digest()
    python = env.our_environment()
    for name in names:
        _say(name)
        before = reference()
        where = env.our_environment(EXTRAS[name]) if name in EXTRAS else python
        rows = env.measurements(where, f"{name}.py", *(OURS[name] if quick else ()))
        results["ours"][name] = {**_moment(before), "source": source, "rows": rows}
        for row in rows:
            _say(f"  {json.dumps(row)}")
    results["ours"]["versions"] = env.versions(python)


def measure_peer(results: dict, peer: env.Peer) -> None:
    """Run a peer's scripts; one that cannot run is noted with the reason."""
    _say(f"{peer.name}: installing {' '.join(peer.requirements)}")
    entry: dict = {"rows": []}
    try:
        python = env.peer_environment(peer)
        entry.update(_moment(reference()))
        if peer.start is not None:
            entry["rows"] += env.measurements(python, "size.py")
            entry["rows"] += env.measurements(python, "import_time.py", "--names", peer.start)
        entry["versions"] = env.versions(python)
        for script in peer.scripts:
            _say(f"  {script}")
            entry["rows"] += env.measurements(python, f"peers/{script}")
    except env.CannotRunError as reason:
        _say(f"  cannot run: {reason}")
        entry["cannot_run"] = str(reason)
    for row in entry["rows"]:
        _say(f"  {json.dumps(row)}")
    results["peers"][peer.name] = entry


def measure_integration(results: dict, framework: str) -> None:
    """Time a call in a framework, alone and with us around it, in one process."""
    _say(f"{framework}: installing this checkout beside it")
    entry: dict = {"rows": []}
    try:
        python = env.our_environment(framework)
        entry.update(_moment(reference()), source=env.source_digest())
        script = f"integrations/b_{framework.replace('-', '_')}.py"
        entry["rows"] = env.measurements(python, script)
    except env.CannotRunError as reason:
        _say(f"  cannot run: {reason}")
        entry["cannot_run"] = str(reason)
    for row in entry["rows"]:
        _say(f"  {json.dumps(row)}")
    results.setdefault("integrations", {})[framework] = entry


def _options() -> argparse.Namespace:
    names = [*OURS, *(peer.name for peer in env.PEERS)]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="ours with few samples; print only")
    parser.add_argument("--peers", action="store_true", help="measure the peers as well")
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        choices=["ours", "peers", "integrations", *names],
        help=f"measure just this, may be repeated: ours, peers, integrations, {', '.join(names)}",
    )
    return parser.parse_args()


def _chosen(options: argparse.Namespace) -> tuple[list[str], list[env.Peer], list[str]]:
    only = set(options.only or (("ours", "peers") if options.peers else ("ours",)))
    ours = [name for name in OURS if only & {"ours", name}]
    if options.quick:
        return ours, [], []
    peers = [peer for peer in env.PEERS if only & {"peers", peer.name}]
    return ours, peers, [name for name in INTEGRATIONS if "integrations" in only]


def _read() -> dict:
    if RESULTS.exists():
        return json.loads(RESULTS.read_text())
    return {"ours": {}, "peers": {}}


def _moment(speed: dict) -> dict:
    """Return when and on what something was measured; ``speed`` is that of plain Python then."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, "
        f"{platform.machine()}",
        "reference": speed,
        "load": round(os.getloadavg()[0], 1),
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
