"""The tests' random choices can be repeated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chance import dice

ROOT = Path(__file__).parents[1]
SHOWN = os.environ.get("WINK_TEST_SHOWN")
"""A file to add the choices to; only set by the tests below."""


@given(st.lists(st.integers(), min_size=3))
def test_examples_are_given(numbers: list[int]):
    if SHOWN is not None:
        with open(SHOWN, "a") as shown:
            shown.write(f"{numbers}\n")


def test_dice_are_thrown():
    assert dice("a").random() == dice("a").random() != dice("b").random()
    if SHOWN is not None:
        with open(SHOWN, "a") as shown:
            shown.write(f"{dice().random()}\n")


def choices(shown: Path, **settings: str) -> list[str]:
    """Return what the two tests above choose in a process of their own."""
    names = [test.__name__ for test in (test_examples_are_given, test_dice_are_thrown)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WINK_")}
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
        + [f"{__file__}::{name}" for name in names],
        env={**kept, "WINK_TEST_SHOWN": str(shown), **settings},
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    return sorted(shown.read_text().splitlines())


@pytest.mark.heavy
def test_make_test_always_makes_the_same_choices(tmp_path: Path):
    assert choices(tmp_path / "once") == choices(tmp_path / "twice")


@pytest.mark.heavy
def test_make_torture_makes_the_choices_of_its_seed(tmp_path: Path):
    torture = {"WINK_HEAVY": "1", "WINK_THOROUGH": "1"}
    once = choices(tmp_path / "once", **torture, WINK_SEED="1")

    assert choices(tmp_path / "twice", **torture, WINK_SEED="1") == once
    assert choices(tmp_path / "other", **torture, WINK_SEED="2") != once
