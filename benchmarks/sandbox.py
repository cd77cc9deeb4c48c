"""A command in each sandbox, beside a bare subprocess and beside the same command without one.

``start`` is what it takes to find out that a sandbox works, once for a section; ``command`` is one
command, committed, and ``rolled_back`` one that fails.
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


def main() -> None:
    quick = is_quick()
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()), "work")
        root.mkdir()
        files = stack.enter_context(HostFilesystem(root))
        found = find_all()
        measure(files, {n: s for n, s in found.items() if n != SLOW}, 5 if quick else 60)
        measure(files, {n: s for n, s in found.items() if n == SLOW}, 3 if quick else 20)


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


if __name__ == "__main__":
    main()
