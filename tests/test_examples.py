"""The programs in ``examples/`` that tell a whole story, run as a reader runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def shown_by(name: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout


def test_the_code_fixer_may_not_touch_the_tests_and_its_wrong_fix_is_undone():
    shown = shown_by("code_fixer.py")

    assert shown.startswith("Commands run in")
    assert "-- write_file    Cannot change test_mean.py: it is protected." in shown
    assert shown.count("-- shell_execute The command exited with code 1. Its changes") == 2
    assert "ok shell_execute The command exited with code 0.\n" in shown
    assert "All tests pass." in shown
    assert shown.count("+++") == 1  # of all calls, one has changed something
    assert "+    return sum(values) / (len(values) or 1)\n" in shown


def test_two_agents_change_one_file_and_neither_is_lost():
    assert shown_by("two_agents.py").splitlines() == [
        "Before: port = 80",
        "one: Merged 1 path into the workspace",
        "two: The branch cannot be merged: settings.ini was changed in the same places by the"
        " branch and by others",
        "two: Merged 1 path into the workspace",
        "After: ports = 8080, 443",
        "Undone: port = 8080",
    ]


def test_a_batch_of_deletions_is_approved_counted_and_kept_whole_or_not_at_all():
    shown = shown_by("data_cleanup.py")

    assert "-- delete Call to 'delete' was not approved by data owner: no more than 3" in shown
    assert "-- delete 10 orders must have a customer, and now 9 have\n" in shown
    assert "ok delete Deleted 2 customers\n          (approval: approved by data owner)" in shown
    assert "-- delete Quota exceeded: 2/2 calls used\n" in shown
    left, deleted = shown.split("Left:\n")[1].split("deleted.csv:\n")
    assert left.split() == ["1,ada@example.org,9", "4,carl@example.org,1", "6,test@test.test,0"]
    assert deleted.split() == ["3,bob@example.org,0,2019,old", "5,dora@example.org,0,2017,old"]


def test_a_deployment_that_fails_outside_is_taken_back_and_nobody_hears_of_it():
    shown = shown_by("deployment.py")

    denied = "-- deploy      Cannot call 'deploy' - missing required tools: build, run_tests\n"
    assert shown.startswith(denied)
    assert (
        "-- deploy      The smoke test failed with 503: no workers\n"
        "               Undone: session, Filesystem. Nothing is left of it.\n"
        "-- announce    Cannot call 'announce' - missing required tools: deploy\n"
    ) in shown
    assert "Not undone: what it did outside the session, files and resources.\n" in shown
    assert "-- announce    Say which version it is: 1.1 is live\n" in shown
    assert "The cluster has run: 1.0, 1.1, 1.0, 1.1\n" in shown
    assert shown.endswith("Everybody heard: ['Shop 1.1 is here']\n")


def test_of_three_repairs_the_one_that_passes_the_check_is_merged():
    shown = shown_by("best_of_three.py")

    assert shown.startswith("repair-2 passed: exit code 0\n")
    assert "repair-1 failed: IndexError: list index out of range\n" in shown
    assert "Merged: ('shop.py',)\nLeft: ['repair-1', 'repair-3']\n" in shown
    assert shown.endswith("    return sum(prices)\n\n")


def test_the_call_that_broke_a_value_is_found_in_sql():
    shown = shown_by("debugger_query.py")

    assert shown.startswith("Calls by outcome:\n  committed: 4\n  ok: 2\n")
    assert "TAX = 0.91 was written by call 3, edit_file.\n" in shown
    assert "The model said: The currency is next; I rewrite the line above it, too.\n" in shown
    assert "-TAX = 0.19\n" in shown
