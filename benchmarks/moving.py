"""Workspaces that move: how long storing, creating and packing take. ``python moving.py [FILES]``.

Storage is a directory on the same disk, so these are our own costs, without a network.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from weakincentives.durable import LocalObjects
from weakincentives.filesystem import (
    Branch,
    BranchUpload,
    materialize,
    store_tree,
    unpack_branch,
)

T = TypeVar("T")


class Counted(LocalObjects):
    """Knows how much was stored."""

    count = size = 0

    def put(self, key: str, data: bytes) -> None:
        self.count += 1
        self.size += len(data)
        super().put(key, data)


def timed(name: str, objects: Counted, do: Callable[[], T]) -> T:
    objects.count = objects.size = 0
    began = time.perf_counter()
    found = do()
    took = time.perf_counter() - began
    print(f"{name:44} {took * 1000:9.1f} ms {objects.count:5} objects {objects.size:11,} bytes")
    return found


def make_files(root: Path, count: int) -> None:
    draw = random.Random(1)
    words = [f"word{number}" for number in range(2000)]
    for number in range(count):
        path = root / f"d{number // 100}" / f"f{number % 100}.py"
        if number % 100 == 0:
            path.parent.mkdir(parents=True)
        path.write_text(" ".join(draw.choices(words, k=draw.randint(20, 700))))


def main(count: int) -> None:
    with tempfile.TemporaryDirectory(prefix="wink-moving-") as folder:
        place = Path(folder)
        root, objects = place / "w", Counted(place / "objects")
        make_files(root, count)
        base = timed(f"store {count} files", objects, lambda: store_tree(root, objects))
        timed("store again, unchanged", objects, lambda: store_tree(root, objects))
        (root / "d0/f0.py").write_text("changed")
        timed("store again, one changed", objects, lambda: store_tree(root, objects))
        there = timed(
            f"create {count} files", objects, lambda: materialize(base, place / "t/w", objects)
        )
        branch = Branch.create(there, "b")
        upload = BranchUpload(branch, objects)
        for changed in (1, 100):
            for number in range(changed):
                branch.write(f"d{number}/f1.py", os.urandom(2000).hex())
            lines = timed(f"send a branch, {changed} changed files", objects, upload.pending)
            print(f"{'':44} {sum(map(len, lines)):9,} bytes of lines")
            upload.saved(len(lines))
        branch.close()
        branch = Branch.open(there, "b")
        every = BranchUpload(branch, objects).pending()
        branch.close()
        timed(
            f"unpack a branch of {len(every)} commits",
            objects,
            lambda: unpack_branch(there, "u", every, objects).close(),
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50_000)
