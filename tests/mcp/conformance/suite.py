"""The protocol's conformance suite, as `make servers` installs it, run on a client or a server."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
NODE = Path(os.environ.get("WINK_MCP_NODE", ROOT / ".venv-servers" / "node"))
BIN = NODE / "node_modules" / ".bin"
EXPECTED_FAILURES = Path(__file__).parent / "expected_failures.yml"
"""What fails, each with its upstream reference; an entry that passes fails the run."""
REVISIONS = ("2025-03-26", "2025-06-18", "2025-11-25", "2026-07-28")
FROZEN = ("2025-11-25", "2026-07-28")
"""The revisions whose requirements the suite has frozen."""


def expected_failures(role: str) -> set[str]:
    """Return the scenarios that fail."""
    _, _, listed = EXPECTED_FAILURES.read_text().partition(f"{role}:\n")
    lines = takewhile(lambda line: line.startswith("  "), listed.splitlines())
    return {line.removeprefix("  - ") for line in lines if line.startswith("  - ")}


def program(name: str) -> str:
    """Return a program that npm installed, or skip the test."""
    if not (BIN / name).exists():
        pytest.skip(f"{name} is not installed: run `make servers`")
    return str(BIN / name)


def environment() -> dict[str, str]:
    """Return an environment in which the right Node comes first."""
    return {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}


def run(role: str, results: Path, *options: str, seconds: float = 600) -> str:
    """Run scenarios of a role, and return what the suite says; it must be satisfied."""
    command = [program("conformance"), role, "-o", str(results), *options]
    done = subprocess.run(
        [*command, "--expected-failures", str(EXPECTED_FAILURES)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def marked(said: str, mark: str) -> set[str]:
    """Return the scenarios that a run's summary marks so: with ✓ or ✗. Hollow ones are neither."""
    lines = [line.split(maxsplit=1) for line in said.splitlines() if line.startswith(f"{mark} ")]
    return {rest.partition(":")[0] for _, rest in lines if ": 0 passed, 0 failed" not in rest}


def checks(results: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every check of a run, with the name of its scenario."""
    for path in sorted(results.rglob("checks.json")):
        scenario = path.parent.name.removeprefix("server-").removeprefix("client-")
        for check in json.loads(path.read_text()):
            yield scenario, check
