"""Runs the examples in README.md and docs/ as tests."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# Tests, and what they start, keep their state here: never in the home of whoever runs them. Those
# that become another user name a directory of that user.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="wink-tests-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "docs/*.md", "tests/seeds/protocol.md"],
).pytest()


SLOW_SETUP = (
    "test_docs_site.py",
    "test_local.py",
    "test_package.py",
    "test_page.py",
    "test_public_servers.py",
    "test_ui.py",
)


class ByTest(LoadScopeScheduling):
    """Gives each process a whole page, or one test with all its parameters, at a time."""

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        super().__init__(config, log)
        # Largest first would go through all modules again for every size, and set them up again.
        config.option.loadscopereorder = False

    def mark_test_complete(
        self, node: WorkerController, item_index: int, duration: float = 0
    ) -> None:
        """Forget what is complete; else every test is counted again after each."""
        super().mark_test_complete(node, item_index, duration)
        scope = self._split_scope(self.registered_collections[node][item_index])
        if all(self.assigned_work[node][scope].values()):
            del self.assigned_work[node][scope]

    def _split_scope(self, nodeid: str) -> str:
        return _in_one_process(nodeid) or nodeid.partition("[")[0]


def _in_one_process(nodeid: str) -> str:
    """Return the name of what must run in one process with this test, if anything."""
    path = nodeid.partition("::")[0]
    if "contrib/tools/test_sandbox" in path:
        return "sandbox"  # a test that floods the disk would stop the command of another
    return path if path.endswith((".md", *SLOW_SETUP)) else ""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Always run the tests in the same order; `make torture` gives another seed."""
    if getattr(config.option, "randomly_seed", None) == "default":
        config.option.randomly_seed = int(os.environ.get("WINK_SEED") or 0)


class StartsElsewhere(pytest.Dir):
    """A directory whose files each process collects from another one on.

    Compiling the tests takes longer than importing them. Together the processes compile each file
    once, and find most of what the others have compiled.
    """

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        found = list(super().collect())
        process = getattr(self.config, "workerinput", {"workerid": "gw0", "workercount": 1})
        start = int(process["workerid"].removeprefix("gw")) * len(found) // process["workercount"]
        return found[start:] + found[:start]


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Dir:
    return StartsElsewhere.from_parent(parent, path=path)


@pytest.hookimpl(tryfirst=True, specname="pytest_collection_modifyitems")
def pytest_put_in_one_order(items: list[pytest.Item]) -> None:
    """Give all processes the same order, which xdist demands."""
    items.sort(key=lambda item: str(item.path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    """Balance the processes by test: one file can hold a minute of work."""
    return ByTest(config, log) if config.getvalue("dist") == "loadscope" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the blocks of a page back in order: the others are shuffled, a page is read downward.

    What one process must do alone comes first, then what takes long: neither then ends long after
    all others.
    """
    places = [n for n, item in enumerate(items) if item.path.suffix == ".md"]
    pages = sorted((items[n] for n in places), key=lambda i: (str(i.path), i.location[1] or 0))
    for place, item in zip(places, pages, strict=True):
        items[place] = item
    items.sort(key=lambda item: (not _in_one_process(item.nodeid), "heavy" not in item.keywords))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let what a test logged go from one process to another: not all text is Unicode."""
    report = yield
    report.sections = [
        (title, text.encode("utf-8", "backslashreplace").decode())
        for title, text in report.sections
    ]
    return report
