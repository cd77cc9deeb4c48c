"""Our use of servers, and what the protocol's own conformance suite says of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from suite import FROZEN, REVISIONS, checks, marked, run

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
# Extensions of the protocol that the SDK does not have either: tokens that are bound to a key
# (SEP-1932), and workload identities as grants (SEP-1933). Nothing depends on them.
EXTENSIONS_WITHOUT = {"auth/dpop", "auth/dpop-nonce", "auth/wif-jwt-bearer"}


@pytest.mark.parametrize("revision", REVISIONS)
def test_every_scenario_of_a_revision_passes_and_none_is_hollow(revision: str, tmp_path: Path):
    options = ("--suite", "all", "--spec-version", revision)
    said = run("client", tmp_path, *PATIENCE, *options, seconds=1500)

    passed = [line for line in said.splitlines() if line.startswith("✓ ")]
    assert len(passed) == SCENARIOS[revision], said
    weak = {check["name"] for _, check in checks(tmp_path) if check["status"] not in FULL}
    assert weak <= NOT_IN_2026


@pytest.mark.parametrize("revision", FROZEN)
def test_the_frozen_requirements_of_a_revision_hold(revision: str, tmp_path: Path):
    said = run("client", tmp_path, *PATIENCE, "--requirements", revision, seconds=1500)

    assert len(marked(said, "✓")) >= REQUIRED[revision], said
    assert marked(said, "✗") == EXTENSIONS_WITHOUT, said
