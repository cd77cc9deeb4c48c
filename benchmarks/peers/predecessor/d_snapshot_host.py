"""Write one file of a real directory in a transaction, and commit or roll back."""

import shutil
import sys
import time
from pathlib import Path
from statistics import median

# At the end: a module of ours must never stand before one of the peer's.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from common import VERSION, Desk, compare, emit

from environments import HOME
from weakincentives.filesystem import HostFilesystem
from weakincentives.runtime import create_snapshot, tool_transaction


def measure(files, batches):
    root = HOME / "disk" / f"files-{files}"
    if not root.exists():
        sys.exit("run benchmarks/disk.py first: it makes the directories")
    fs = HostFilesystem(_root=str(root))
    desk = Desk(fs=fs)
    numbers = iter(range(10**9))

    def text():
        return f"{next(numbers):024}" + "x" * 1000

    with desk.prompt.resources:
        resources = desk.prompt.resources.context
        started = time.perf_counter()
        create_snapshot(desk.session, resources)
        first = time.perf_counter() - started

        def commit():
            with tool_transaction(desk.session, resources):
                fs.write("d0/f1.txt", text())

        def roll_back():
            try:
                with tool_transaction(desk.session, resources):
                    fs.write("d0/f1.txt", text())
                    raise ValueError
            except ValueError:
                pass

        def nothing():
            with tool_transaction(desk.session, resources):
                pass

        operations = {"commit": commit, "roll_back": roll_back, "nothing": nothing}
        samples = compare(operations, times=1, batches=batches)
    emit(
        "disk predecessor",
        version=VERSION,
        files=files,
        first=round(first * 1e6),
        **{
            name: {
                "wall": round(median(taken.wall), 1),
                "wall_p10": round(sorted(taken.wall)[len(taken.wall) // 10], 1),
            }
            for name, taken in samples.items()
        },
    )
    shutil.rmtree(fs.git_dir, ignore_errors=True)


if __name__ == "__main__":
    for files in (100, 1_000, 10_000, 50_000):
        measure(files, 10)
