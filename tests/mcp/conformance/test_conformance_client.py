"""Our use of servers, and what the protocol's own conformance suite says of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from suite import FROZEN, REVISIONS, checks, expected_failures, marked, run

pytest.importorskip("mcp")
pytestmark = pytest.mark.heavy

COMMAND = f"{sys.executable} {Path(__file__).parent / 'client.py'}"
# The suite starts all clients of a run at once, and few processors share them.
PATIENCE = ("--command", COMMAND, "--timeout", "1200000")
# How many scenarios there are for a client: none may vanish.
SCENARIOS = {"2025-03-26": 2, "2025-06-18": 5, "2025-11-25": 19, "2026-07-28": 33}
REQUIRED = {"2025-11-25": 18, "2026-07-28": 32}
FULL = ("SUCCESS", "INFO")
# The headers of requests that the revision of 2026 does not have any more.
NOT_IN_2026 = {
    "ClientMcpMethodHeader_initialize",
    "ClientMcpMethodHeader_notifications_initialized",
}


@pytest.mark.parametrize("revision", REVISIONS)
def test_every_scenario_of_a_revision_passes_and_none_is_hollow(revision: str, tmp_path: Path):
    options = ("--suite", "all", "--spec-version", revision)
    said = run("client", tmp_path, *PATIENCE, *options, seconds=1500)

    passed = [line for line in said.splitlines() if line.startswith("✓ ")]
    assert len(passed) == SCENARIOS[revision], said
    found = list(checks(tmp_path))
    weak = {check["name"] for _, check in found if check["status"] not in FULL}
    assert weak <= NOT_IN_2026
    strong = {scenario for scenario, check in found if check["status"] == "SUCCESS"}
    assert len(strong) == SCENARIOS[revision]


@pytest.mark.parametrize("revision", FROZEN)
def test_the_frozen_requirements_of_a_revision_hold(revision: str, tmp_path: Path):
    said = run("client", tmp_path, *PATIENCE, "--requirements", revision, seconds=1500)

    assert len(marked(said, "✓")) >= REQUIRED[revision], said
    assert marked(said, "✗") == expected_failures("client"), said


@pytest.mark.parametrize("scenario", sorted(expected_failures("client")))
def test_what_is_expected_to_fail_fails(scenario: str, tmp_path: Path):
    """Where it passes, the suite itself is not satisfied: then the list gets shorter."""
    run("client", tmp_path, *PATIENCE, "--scenario", scenario)
