"""Our server, and what the protocol's own conformance suite says of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from suite import FROZEN, REVISIONS, checks, expected_failures, marked, program, run

pytest.importorskip("mcp")
pytestmark = pytest.mark.heavy

# How many scenarios there are for a server: none may vanish.
SCENARIOS = {"2025-03-26": 1, "2025-06-18": 27, "2025-11-25": 33, "2026-07-28": 40}
REQUIRED = {"2025-11-25": 33, "2026-07-28": 40}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    program("conformance")
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "server.py")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(server.stdout.readline())}/mcp"
    finally:
        server.kill()
        server.communicate()


@pytest.mark.parametrize("revision", REVISIONS)
def test_every_scenario_of_a_revision_passes_and_none_is_hollow(
    url: str, revision: str, tmp_path: Path
):
    said = run("server", tmp_path, "--url", url, "--suite", "all", "--spec-version", revision)

    assert said.count("=== Running scenario") == SCENARIOS[revision], said
    found = {(scenario, check["id"], check["status"]) for scenario, check in checks(tmp_path)}
    assert {each for each in found if each[2] not in ("SUCCESS", "INFO")} == set()
    assert len({each[0] for each in found if each[2] == "SUCCESS"}) == SCENARIOS[revision]


@pytest.mark.parametrize("revision", FROZEN)
def test_the_frozen_requirements_of_a_revision_hold(url: str, revision: str, tmp_path: Path):
    said = run("server", tmp_path, "--url", url, "--requirements", revision)

    assert len(marked(said, "✓")) >= REQUIRED[revision], said
    without = set() if revision == "2025-11-25" else expected_failures("server")
    assert marked(said, "✗") == without, said


def test_what_is_expected_to_fail_fails(url: str, tmp_path: Path):
    """Where it passes, the suite itself is not satisfied: then the list gets shorter."""
    said = run("server", tmp_path, "--url", url, "--suite", "pending")

    assert marked(said, "✗") == expected_failures("server"), said
