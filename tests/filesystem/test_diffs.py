"""Diffs take a bounded time, whatever was changed, and git applies them all the same."""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weakincentives.filesystem import HostFilesystem
from weakincentives.filesystem.diffs import Effort, hunks

HEADER = "diff --git a/f b/f\n--- a/f\n+++ b/f\n"


def check_with_git(old: bytes, new: bytes, patch: bytes) -> None:
    """Let git make the one text of the other, and back."""
    with tempfile.TemporaryDirectory() as above:
        file = Path(above, "f")
        file.write_bytes(old)
        for options, expected in (([], new), (["--reverse"], old)):
            done = subprocess.run(
                ["git", "apply", "--unsafe-paths", "--whitespace=nowarn", *options, "-"],
                cwd=above, input=patch, capture_output=True, check=False,
                env={**os.environ, "GIT_CEILING_DIRECTORIES": str(Path(above).parent)},
            )  # fmt: skip
            assert done.returncode == 0, (done.stderr, patch[:2000])
            assert file.read_bytes() == expected


def lines_of(text: str) -> list[str]:
    return text.splitlines(keepends=True)


TEXTS = st.lists(st.sampled_from(["a", "b", "c", "", "ab"]), max_size=30).map("\n".join)


@given(TEXTS, TEXTS, st.sampled_from([0, 10, 100, 100_000]))
@settings(max_examples=60, deadline=None)
def test_git_applies_the_hunks_however_little_effort_there_was(old: str, new: str, steps: int):
    found = "".join(hunks(lines_of(old), lines_of(new), Effort(steps)))

    assert bool(found) is (old != new)
    if found and old and new:
        check_with_git(old.encode(), new.encode(), (HEADER + found).encode())


@given(TEXTS, st.lists(st.integers(0, 30), max_size=3))
def test_a_small_edit_is_told_as_such(text: str, places: list[int]):
    """Lines that stay are not told as gone and come."""
    old = lines_of(text)
    new = list(old)
    for place in places:
        new.insert(min(place, len(new)), "new\n")

    marks = [line[0] for line in hunks(old, new, Effort())]

    if text.endswith("\n") or not places:
        assert marks.count("+") == len(places)
        assert "-" not in marks


random_lines = random.Random(7)
BIG: dict[str, tuple[Callable[[int], str], Callable[[int], str]]] = {
    "rewritten": (lambda n: f"old line number {n} of the file\n", lambda n: f"new {n * 7}\n"),
    "indented": (lambda n: f"x = {n % 50}\n", lambda n: f"    x = {n % 50}\n"),
    "of two kinds of lines": (
        lambda n: random_lines.choice("ab") + "\n",
        lambda n: random_lines.choice("ab") + "\n",
    ),
    "of one line over and over": (lambda n: "x\n", lambda n: "x\n" if n % 2 else "y\n"),
    "shuffled": (lambda n: f"{n}\n", lambda n: f"{n * 7919 % 100_003}\n"),
}


@pytest.mark.parametrize("kind", BIG)
def test_a_rewritten_megabyte_takes_bounded_effort(kind: str, tmp_path: Path):
    """In the number of steps, not in seconds; the rest is linear. And git applies it."""
    before, after = BIG[kind]
    texts = ["".join(map(each, range(100_000)))[: 878 * 1024] for each in (before, after)]
    effort = Effort()
    list(hunks(lines_of(texts[0]), lines_of(texts[1]), effort))
    assert effort.left > -5000  # it stops within one round

    (tmp_path / "f").write_text(texts[0])
    with HostFilesystem(tmp_path) as files:
        view = files.fork()
        view.write("f", texts[1])
        (change,) = view.diff_here()
    check_with_git(texts[0].encode(), texts[1].encode(), change.text.encode())
