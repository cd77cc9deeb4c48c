from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_the_example_plans_fails_undoes_and_finishes():
    shown = subprocess.run(
        [sys.executable, str(EXAMPLES / "plan_and_edit.py")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert "-- fix_and_check Cannot write to shop.py without reading it first\n" in shown
    assert "-- fix_and_check The check fails: AssertionError\n" in shown
    assert "ok fix_and_check Fixed, and the check passes\n" in shown
    assert (
        "Sent back once: The task is not done yet. Unfinished steps: 3. Check it (pending)\n"
    ) in shown
    assert "Plan: Fix the total (3 of 3 steps done)\n" in shown
    assert shown.endswith("shop.py is now: 'def total(prices):\\n    return sum(prices)\\n'\n")
