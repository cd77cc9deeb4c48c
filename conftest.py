"""Runs the examples in README.md and docs/ as tests."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Generator

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

# Tests, and what they start, keep their state here: never in the home of whoever runs them. Those
# that become another user name a directory of that user.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="wink-tests-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "docs/*.md", "tests/seeds/protocol.md"],
).pytest()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the blocks of a page back in order: the others are shuffled, a page is read downward."""
    places = [n for n, item in enumerate(items) if item.path.suffix == ".md"]
    pages = sorted((items[n] for n in places), key=lambda i: (str(i.path), i.location[1] or 0))
    for place, item in zip(places, pages, strict=True):
        items[place] = item


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let what a test logged go from one process to another: not all text is Unicode."""
    report = yield
    report.sections = [
        (title, text.encode("utf-8", "backslashreplace").decode())
        for title, text in report.sections
    ]
    return report
