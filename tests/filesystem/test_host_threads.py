"""Several threads on one real directory see all of it."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from weakincentives.filesystem import HostFilesystem

pytestmark = pytest.mark.skipif(os.name != "posix", reason="a real directory needs POSIX calls")

THREADS = 4
TIMES = 40


@pytest.mark.parametrize("way", ["list", "glob", "search", "grep"])
def test_threads_that_list_the_root_at_once_each_see_every_name(tmp_path: Path, way: str):
    # More than one read of the directory gives.
    names = tuple(f"file-with-a-rather-long-name-to-fill-the-buffer-{n:04}" for n in range(800))
    root = tmp_path / "root"
    root.mkdir()
    for name in names:
        (root / name).write_text("text")
    together = threading.Barrier(THREADS)

    with HostFilesystem(root) as fs:
        ways = {
            "list": lambda: tuple(one.path for one in fs.list()),
            "glob": lambda: fs.glob("*"),
            "search": lambda: fs.search("file"),
            "grep": lambda: tuple(match.path for match in fs.grep("text")),
        }

        def look() -> set[tuple[str, ...]]:
            together.wait()
            return {ways[way]() for _ in range(TIMES if way != "grep" else TIMES // 10)}

        with ThreadPoolExecutor(THREADS) as threads:
            seen = [future.result() for future in [threads.submit(look) for _ in range(THREADS)]]

    assert seen == [{names}] * THREADS


def test_a_write_waits_for_a_merge_in_another_thread(tmp_path: Path):
    (tmp_path / "root").mkdir()
    with HostFilesystem(tmp_path / "root") as fs, ThreadPoolExecutor() as pool:
        for number in range(5):
            view = fs.fork()
            for name in range(100):
                view.write(f"{number}/{name}", "merged")
            merging = pool.submit(fs.merge, view)
            writes = 0
            while not merging.done() or not writes:
                fs.write(f"own-{number}", str(writes))
                writes += 1
            merging.result()

        assert len(fs.glob("**/*")) == 5 * 101
