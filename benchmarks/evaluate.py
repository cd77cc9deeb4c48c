"""Evaluate a script in a process of its own: start-up, evaluation, files; beside a bare subprocess.

The CPU time is that of both processes. Wall time is more on a busy machine: starting a process is
waiting for it.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

from timing import Samples, emit, is_quick
from weakincentives.contrib.tools import AstevalConfig, AstevalSection
from weakincentives.testing import make_context_with_files

FILES = {f"d{n // 10}/f{n}.txt": "x" * 1000 for n in range(100)}
SCRIPTS = {
    "1 + 1": "1 + 1",
    "with two modules": "import json, re\njson.dumps(re.findall('a', 'aba'))",
    "a loop of 10,000": "total = 0\nfor i in range(10000):\n    total += i\ntotal",
    "reads 100 files": "sum([len(read_file(path)) for path in glob_files('**/*.txt')])",
}


def bare() -> None:
    """Python and nothing else, as the process is started."""
    subprocess.run([sys.executable, "-I", "-S", "-B", "-c", "print(1 + 1)"], capture_output=True)


def operations() -> dict[str, Callable[[], object]]:
    """Return what is timed, by name."""
    context = make_context_with_files(FILES)

    def evaluating(code: str, config: AstevalConfig) -> Callable[[], object]:
        (tool,) = AstevalSection(config=config).tools
        result = tool(code=code, context=context)
        assert result.success, result.message
        return lambda: tool(code=code, context=context)

    timed: dict[str, Callable[[], object]] = {"bare": bare}
    for name, code in SCRIPTS.items():
        timed[name] = evaluating(code, AstevalConfig())
    timed["1 + 1 without isolation"] = evaluating("1 + 1", AstevalConfig(isolation="none"))
    return timed


def cpu_seconds() -> float:
    """Return what this process and those that it has started and ended have used."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def measure(batches: int) -> None:
    timed = operations()
    samples = {name: Samples() for name in timed}
    for _ in range(batches):
        for name, operation in timed.items():
            wall, cpu = time.perf_counter(), cpu_seconds()
            operation()
            samples[name].add(cpu_seconds() - cpu, time.perf_counter() - wall)
    least = median(samples["bare"].cpu), median(samples["bare"].wall)
    for name, taken in samples.items():
        emit(
            f"evaluate {name}",
            evaluation=taken.figures(),
            wall_p10=round(sorted(taken.wall)[batches // 10], 1),
            over_bare=round(median(taken.cpu) - least[0], 1),
            over_bare_wall=round(median(taken.wall) - least[1], 1),
        )


if __name__ == "__main__":
    measure(5 if is_quick() else 40)
