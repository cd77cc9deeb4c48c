"""A command in each sandbox, beside a bare subprocess and beside the same command without one.

``start`` is what it takes to find out that a sandbox works, once for a section; ``command`` is one
command, committed, and ``rolled_back`` one that fails. The default sandbox is measured more
closely: over two thousand commands, with a command that makes many files, and back to back and
after a rest. There it takes turns with a bare subprocess, with the same namespaces without an
overlay, and with what else is installed: bubblewrap alone, and sandlock.

On a busy machine read p10, and only the difference to the bare subprocess in the same line.
``chrt -r 10 python benchmarks/sandbox.py`` lets other programs wait, so that the figures are close
to those of an idle machine. It can be run as any user.
"""

import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import get_args

import environments
from timing import Samples, compare, emit, is_quick
from weakincentives.contrib.tools import Sandbox, find_sandbox
from weakincentives.contrib.tools.sandbox.engines import EngineName, SandboxedCommand
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
            with peers(Path(root.parent, "peers")) as others:
                for rest in RESTS:
                    measure_pace(files, found[CLOSER], others, rest, 10 if quick else 150)
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


def measure_pace(
    files: HostFilesystem,
    sandbox: Sandbox,
    others: Mapping[str, Callable[[], float]],
    rest: float,
    times: int,
) -> None:
    """Time commands in turn, each of them after a bare one and a rest."""
    bare = Samples()
    ways: dict[str, Callable[[], float]] = {
        "command": partial(_timed, partial(run, sandbox, files, CHANGE, ok=True)),
        # With a zygote of its own: another view of the system discards an armed sandbox.
        "no_overlay": partial(time_without_overlay, find_sandbox(CLOSER), files.root),
        **others,
    }
    samples = {name: Samples() for name in ways}
    for way in ways.values():
        for _ in range(3):  # from the second one on, the next sandbox is armed
            way()
    for _ in range(times):
        for name, way in ways.items():
            time.sleep(rest)
            bare.batch(partial(run_bare, files.root), 1)
            time.sleep(rest)
            samples[name].add(0, way())
    row = {name: _figures(each) for name, each in samples.items()}
    over = {name: _over(bare, each) for name, each in samples.items()}
    overlay = _over(samples["no_overlay"], samples["command"])
    emit(
        "sandbox pace",
        engine=sandbox.name,
        rest=rest,
        bare=_figures(bare),
        **row,
        over=over,
        overlay_and_commit=overlay,
    )


def _timed(operation: Callable[[], object]) -> float:
    began = time.perf_counter()
    operation()
    return time.perf_counter() - began


def time_without_overlay(sandbox: Sandbox, root: Path) -> float:
    """Return the seconds of a command in the same namespaces that writes to the directory itself.

    As with an overlay, its answer comes before the namespaces are torn down.
    """
    project = sandbox.environment(root)
    command = SandboxedCommand(
        argv=["/bin/sh", "-c", CHANGE],
        workspace=root,
        limits=sandbox.limits,
        cwd=str(root),
        env=project.env,
        project=project,
    )
    began = time.perf_counter()
    with sandbox.engine.wrapped(command) as launch:
        assert launch.start is not None
        started = launch.start(None, b"", ())
        with started.exited() as exited:
            while started.poll() is None:
                select.select([exited], [], [])
        started.end()
        took = time.perf_counter() - began
        assert started.returncode == 0
        started.released()
    return took


@contextmanager
def peers(place: Path) -> Iterator[dict[str, Callable[[], float]]]:
    """Give what can be measured beside ours, with directories of their own."""
    with ExitStack() as stack:
        found: dict[str, Callable[[], float]] = {}
        bwrap = shutil.which("bwrap")
        if bwrap is not None:
            root = place / "bubblewrap"
            root.mkdir(parents=True)
            argv = [bwrap, "--unshare-all", "--die-with-parent", "--ro-bind", "/usr", "/usr"]
            for name in ("/bin", "/lib", "/lib64"):
                argv += ["--symlink", f"usr{name}", name]
            argv += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
            argv += ["--bind", str(root), str(root), "--chdir", str(root), "sh", "-c", CHANGE]
            alone = partial(subprocess.run, argv, check=True, capture_output=True)
            found["bubblewrap_alone"] = partial(_timed, alone)
        python = environments.HOME / "sandlock" / "bin" / "python"
        script = environments.BENCHMARKS / "peers" / "sandlock" / "b_sandlock.py"
        if python.exists():
            for way in ("command", "copy"):
                root = place / way
                root.mkdir(parents=True)
                worker = subprocess.Popen(
                    [python, script, "--serve", way, str(root)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                stack.enter_context(worker)
                found[f"sandlock_{way}"] = partial(_ask, worker)
        yield found


def _ask(worker: subprocess.Popen[str]) -> float:
    """Let another program run a command; return the seconds that it took."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write("\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


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
    return {"bare": _figures(bare), "command": _figures(ours), "over": _over(bare, ours)}


def _over(bare: Samples, ours: Samples) -> dict[str, float]:
    one, other = _figures(bare), _figures(ours)
    return {name: round(other[name] - one[name], 1) for name in ("wall", "wall_p10")}


if __name__ == "__main__":
    main()
