"""Snapshot and roll back files in memory. Needs 0.16.0: later wheels lack these files."""

import sys
from importlib.metadata import version
from pathlib import Path

# At the end: a module of ours must never stand before one of the peer's.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from timing import compare, emit
from weakincentives.contrib.tools import InMemoryFilesystem

BODY = "x" * 1024


def measure(files):
    fs = InMemoryFilesystem()
    for number in range(files):
        fs.write(f"d{number // 100}/f{number}.txt", BODY)

    def write():
        fs.write("d0/f1.txt", "changed")

    def cycle():
        before = fs.snapshot()
        write()
        fs.restore(before)

    samples = compare({"write": write, "cycle": cycle}, times=5, batches=60)
    figures = {name: taken.figures() for name, taken in samples.items()}
    emit(
        "snapshot filesystem",
        version=version("weakincentives"),
        files=files,
        **figures,
        over_bare=round(figures["cycle"]["cpu"] - figures["write"]["cpu"], 3),
    )


for files in (100, 1_000, 10_000):
    measure(files)
