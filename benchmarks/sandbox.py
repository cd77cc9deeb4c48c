"""A command in each sandbox, beside a bare subprocess and beside the same command without one.

``start`` is what it takes to find out that a sandbox works, once for a section; ``command`` is one
command, committed, and ``rolled_back`` one that fails. The default sandbox is measured more
closely: back to back and after a rest, over two thousand commands, and with a command that makes
many files.
On a busy machine read p10, and only the difference to the bare subprocess in the same line.
"""

import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import get_args

from timing import Samples, compare, emit, is_quick
from weakincentives.contrib.tools import Sandbox, find_sandbox
from weakincentives.contrib.tools.sandbox.engines import EngineName
from weakincentives.errors import SandboxUnavailable
from weakincentives.filesystem import HostFilesystem

CHANGE = "printf changed-$$ >a.txt"
FAIL = f"{CHANGE}; false"
SLOW = "podman"
"""Takes so long that few samples must do, and in rounds of its own: the others wait for nobody."""


CLOSER = "namespaces"
RESTS = (0.0, 0.015)
"""Seconds before each command."""
STEPS = 5
"""The long series of commands is shown in so many steps."""
FILES = 5_000


def main() -> None:
    quick = is_quick()
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()), "work")
        root.mkdir()
        files = stack.enter_context(HostFilesystem(root))
        found = find_all()
        measure(files, {n: s for n, s in found.items() if n != SLOW}, 5 if quick else 60)
        measure(files, {n: s for n, s in found.items() if n == SLOW}, 3 if quick else 20)
        if CLOSER in found:
            for rest in RESTS:
                measure_pace(files, found[CLOSER], rest, 10 if quick else 150)
            measure_series(files, found[CLOSER], 100 if quick else 2_000)
            measure_many(files, found[CLOSER], 100 if quick else FILES)


def find_all() -> dict[str, Sandbox]:
    """Return every sandbox that works here; say how long it took to find out, or why not."""
    found: dict[str, Sandbox] = {}
    for name in get_args(EngineName):
        started = time.perf_counter()
        try:
            found[name] = find_sandbox(name)
        except SandboxUnavailable as error:
            emit("sandbox start", engine=name, cannot_run=str(error))
            continue
        took = time.perf_counter() - started
        emit("sandbox start", engine=name, wall=round(took * 1e6, 1))
    return found


def measure(files: HostFilesystem, found: dict[str, Sandbox], batches: int) -> None:
    """Time a command that changes one file, in each of the sandboxes in turn."""
    operations: dict[str, Callable[[], object]] = {"bare": partial(run_bare, files.root)}
    for name, sandbox in found.items():
        operations[f"{name} command"] = partial(run, sandbox, files, CHANGE, ok=True)
        operations[f"{name} rolled_back"] = partial(run, sandbox, files, FAIL, ok=False)
    samples = compare(operations, times=1, batches=batches)
    for name in found:
        ways = {way: _figures(samples[f"{name} {way}"]) for way in ("command", "rolled_back")}
        emit("sandbox command", engine=name, bare=_figures(samples["bare"]), **ways)


def measure_pace(files: HostFilesystem, sandbox: Sandbox, rest: float, times: int) -> None:
    """Time commands in turn with bare ones, each after a rest."""
    bare, ours = Samples(), Samples()
    for _ in range(3):  # from the second one on, the next sandbox is armed
        run(sandbox, files, CHANGE, ok=True)
    for _ in range(times):
        time.sleep(rest)
        bare.batch(partial(run_bare, files.root), 1)
        time.sleep(rest)
        ours.batch(partial(run, sandbox, files, CHANGE, ok=True), 1)
    emit("sandbox pace", engine=sandbox.name, rest=rest, **_beside(bare, ours))


def measure_series(files: HostFilesystem, sandbox: Sandbox, times: int) -> None:
    """Time a long series of commands, to see whether the last ones take longer than the first."""
    for step in range(1, STEPS + 1):
        bare, ours = Samples(), Samples()
        for number in range(times // STEPS):
            ours.batch(partial(run, sandbox, files, CHANGE, ok=True), 1)
            if number % 4 == 0:
                bare.batch(partial(run_bare, files.root), 1)
        done = step * times // STEPS
        emit("sandbox series", engine=sandbox.name, commands=done, **_beside(bare, ours))


def measure_many(files: HostFilesystem, sandbox: Sandbox, count: int) -> None:
    """Time one command that makes many files, and how much of it is our own work."""
    made = Samples()
    command = f"i=0; while [ $i -lt {count} ]; do echo $i >many/$i; i=$((i+1)); done"
    for _ in range(5):
        run(sandbox, files, "rm -rf many; mkdir many", ok=True)
        made.batch(partial(run, sandbox, files, command, ok=True), 1)
    own = {"wall": round(median(made.wall), 1), "cpu": round(median(made.cpu), 1)}
    emit("sandbox many files", engine=sandbox.name, files=count, command=own)


def run_bare(root: Path) -> None:
    subprocess.run(["sh", "-c", CHANGE], cwd=root, check=True, capture_output=True)


def run(sandbox: Sandbox, files: HostFilesystem, command: str, *, ok: bool) -> None:
    done = sandbox.run(files, command, timeout=60)
    assert (done.ok, done.kept) == (ok, ok), done.stderr


def _figures(taken: Samples) -> dict[str, float]:
    return {
        "wall": round(median(taken.wall), 1),
        "wall_p10": round(sorted(taken.wall)[len(taken.wall) // 10], 1),
        "batches": len(taken.wall),
    }


def _beside(bare: Samples, ours: Samples) -> dict[str, dict[str, float]]:
    one, other = _figures(bare), _figures(ours)
    over = {name: round(other[name] - one[name], 1) for name in ("wall", "wall_p10")}
    return {"bare": one, "command": other, "over": over}


if __name__ == "__main__":
    main()
