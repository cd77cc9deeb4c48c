"""A real directory of 100 to 50,000 files: change one of them, and keep the change or roll it back.

Beside the plain write and rename of the same file, beside git, and for shell commands beside the
same command in the same namespaces without an overlay. The directories are made on first use, in
``.bench/``.
"""

import itertools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

from environments import HOME
from timing import Samples, compare, emit, is_quick
from weakincentives.filesystem import HostFilesystem

PLACE = HOME / "disk"
STORES = PLACE / "stores"
SIZES = 100, 1_000, 10_000, 50_000
TARGET = "d0/f1.txt"
COMMAND = f"printf changed-$$ > {TARGET}"
PLAINLY = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--")
GIT = ("git", "-c", "user.name=bench", "-c", "user.email=bench@localhost", "-c", "gc.auto=0")

Operations = dict[int, Mapping[str, Callable[[], object]]]
"""What is timed, by number of files and name."""

numbers = itertools.count()


def body() -> str:
    """Return a text of 1 KiB that no file has had before."""
    return f"{next(numbers):024}" + "x" * 1000


def make_directory(files: int) -> Path:
    """Return a directory with so many files of 1 KiB, a hundred in each directory."""
    root = PLACE / f"files-{files}"
    if not root.exists():
        making = PLACE / f"making-{files}"
        shutil.rmtree(making, ignore_errors=True)
        for number in range(files):
            directory = making / f"d{number // 100}"
            if number % 100 == 0:
                directory.mkdir(parents=True)
            (directory / f"f{number}.txt").write_text(body())
        making.rename(root)
    return root


def make_repository(files: int) -> Path:
    """Return a copy of that directory in which all files are committed to git."""
    root = PLACE / f"git-{files}"
    if not root.exists():
        making = PLACE / f"copying-{files}"
        shutil.rmtree(making, ignore_errors=True)
        shutil.copytree(make_directory(files), making)
        _run(*GIT, "init", "--quiet", cwd=making)
        _run(*GIT, "add", "--all", cwd=making)
        _run(*GIT, "commit", "--quiet", "--message", "start", cwd=making)
        making.rename(root)
    return root


class Calls:
    """What a call does to a directory, with the change kept or rolled back at its end."""

    def __init__(self, fs: HostFilesystem) -> None:
        self.fs = fs

    def commit(self, change: Callable[[HostFilesystem], object]) -> None:
        with self.fs.gate:
            view = self.fs.fork_in_place()
            change(view)
            self.fs.merge(view)

    def roll_back(self, change: Callable[[HostFilesystem], object]) -> None:
        with self.fs.gate:
            view = self.fs.fork_in_place()
            change(view)
            assert self.fs.discard(view) == ()


def measure_writes(roots: dict[int, Path], durability: str, batches: int) -> None:
    with ExitStack() as stack:
        operations: Operations = {}
        for files, root in roots.items():
            calls = Calls(stack.enter_context(_opened(root, durability=durability)))
            _check_calls(calls)
            operations[files] = {
                "plain": partial(write_plainly, root / TARGET, durability == "safe"),
                "commit": partial(calls.commit, write),
                "roll_back": partial(calls.roll_back, write),
            }
        for files, figures in _compare(operations, times=3, batches=batches):
            emit("disk write", files=files, durability=durability, **figures)


def write(view: HostFilesystem) -> None:
    view.write(TARGET, body())


def write_plainly(path: Path, safe: bool) -> None:
    """Write a file beside the one that it then replaces; the least that nobody sees half of."""
    new = path.with_name("new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, body().encode())
        if safe:
            os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(new, path)
    if safe:
        fd = os.open(path.parent, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def measure_reads(roots: dict[int, Path], batches: int) -> None:
    with ExitStack() as stack:
        operations: Operations = {}
        for files, root in roots.items():
            fs = stack.enter_context(_opened(root))
            operations[files] = {
                "plain": partial(read_plainly, str(root / TARGET)),
                "read": partial(fs.read, TARGET),
            }
        for files, figures in _compare(operations, times=20, batches=batches):
            emit("disk read", files=files, **figures)


def read_plainly(path: str) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 1 << 16).decode()
    finally:
        os.close(fd)


def measure_commands(roots: dict[int, Path], batches: int) -> None:
    with ExitStack() as stack:
        operations: Operations = {}
        for files, root in roots.items():
            calls = Calls(stack.enter_context(_opened(root)))
            operations[files] = {
                "plain": partial(_run, *PLAINLY, "sh", "-c", COMMAND, cwd=root),
                "commit": partial(calls.commit, run),
                "roll_back": partial(calls.roll_back, run),
            }
        engine = calls.fs.run("true").engine
        for files, figures in _compare(operations, times=1, batches=batches):
            emit("disk command", files=files, engine=engine, **figures)


def run(view: HostFilesystem) -> None:
    assert view.run(COMMAND).ok


def measure_external(root: Path, files: int, batches: int) -> None:
    """Time calls whose tool starts programs of its own; the first one has to look at every file."""
    with _opened(root) as fs:
        calls = Calls(fs)

        def change(view: HostFilesystem) -> None:
            view.expect_external()
            (root / TARGET).write_text(body())

        started = time.perf_counter()
        calls.roll_back(change)
        first = time.perf_counter() - started
        operations = {
            "commit": partial(calls.commit, change),
            "roll_back": partial(calls.roll_back, change),
        }
        for _, figures in _compare({files: operations}, times=1, batches=batches):
            emit("disk external", files=files, first=round(first * 1e6), **figures)


def measure_git(files: int, batches: int) -> None:
    root = make_repository(files)

    def git(*words: str) -> None:
        _run(*GIT, *words, cwd=root)

    def commit() -> None:
        (root / TARGET).write_text(body())
        git("add", "--all")
        git("commit", "--quiet", "--message", "call")

    def roll_back() -> None:
        (root / TARGET).write_text(body())
        git("reset", "--quiet", "--hard")
        git("clean", "--quiet", "-d", "--force")

    operations = {files: {"commit": commit, "roll_back": roll_back}}
    for _, figures in _compare(operations, times=1, batches=batches):
        emit("disk git", files=files, **figures)


def _opened(root: Path, **options: str) -> HostFilesystem:
    """Open the directory with nothing kept of earlier times."""
    return HostFilesystem(root, store=tempfile.mkdtemp(dir=STORES), **options)


def _check_calls(calls: Calls) -> None:
    """Make sure that what is timed does what it says."""
    fs = calls.fs
    calls.commit(lambda view: view.write(TARGET, "kept"))
    calls.roll_back(lambda view: view.write(TARGET, "not kept"))
    assert fs.read(TARGET) == "kept"


def _run(*command: str, cwd: Path) -> None:
    subprocess.run(command, cwd=cwd, check=True, capture_output=True)


def _compare(
    operations: Operations, *, times: int, batches: int
) -> Iterator[tuple[int, dict[str, dict[str, float]]]]:
    """Yield medians and 10th percentiles by number of files, all sizes timed in turn.

    What a filesystem did in the last minutes makes it faster or slower: it must not look as if the
    number of files did.
    """
    named = {
        f"{files} {name}": operation
        for files, ways in operations.items()
        for name, operation in ways.items()
    }
    samples = compare(named, times=times, batches=batches)
    for files, ways in operations.items():
        yield files, {name: _figures(samples[f"{files} {name}"]) for name in ways}


def _figures(taken: Samples) -> dict[str, float]:
    return {
        "cpu": round(median(taken.cpu), 1),
        "cpu_p10": round(sorted(taken.cpu)[len(taken.cpu) // 10], 1),
        "wall": round(median(taken.wall), 1),
        "wall_p10": round(sorted(taken.wall)[len(taken.wall) // 10], 1),
        "batches": len(taken.wall),
    }


def main() -> None:
    quick = is_quick()
    STORES.mkdir(parents=True, exist_ok=True)
    sizes = SIZES[:2] if quick else SIZES
    roots = {files: make_directory(files) for files in sizes}
    measure_writes(roots, "fast", 30 if quick else 150)
    measure_writes(roots, "safe", 5 if quick else 30)
    measure_reads(roots, 30 if quick else 150)
    measure_commands(roots, 10 if quick else 40)
    for files in sizes:
        measure_git(files, 3 if quick else 10)
    for files, root in roots.items():
        measure_external(root, files, 5 if quick else 20)
    # Not before: where many files were just deleted, ext4 takes longer to make new ones.
    shutil.rmtree(STORES)


if __name__ == "__main__":
    main()
