from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, core, settings

from chance import LIMIT, THOROUGH, dice, is_time_left
from ordinary_user import OrdinaryUser, found_ordinary_user, place_for_others
from postgres import Postgres, started_postgres

gc.disable()  # until all tests are collected: nearly all that collecting makes stays
pytest.register_assert_rewrite("cases")  # of tests/integrations: its failures show the values

# Whoever starts the tests in the background, or with nohup, has these ignored, also by all that the
# tests start; but some are about what they do.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# Nor is a test about the umask, the size of the window, or the settings of whoever starts them.
os.umask(0o022)
_SETTINGS = ("HEAVY", "INTEGRATION", "SECONDS", "SEED", "TEST_SHOWN", "THOROUGH", "TORTURE")
_OF_THE_STARTER = (
    *("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "CLICOLOR_FORCE"),
    *("VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV"),  # an environment that is activated
)
for _name in list(os.environ):
    _of_the_tests = _name.removeprefix("WINK_") in _SETTINGS
    if _name in _OF_THE_STARTER or (_name.startswith("WINK_") and not _of_the_tests):
        del os.environ[_name]

# Shared machines stall, so no example has a deadline. The examples are always the same, because the
# tests say whether a change is sound; `make torture` tries new ones.
EXAMPLES = {"make torture": 1000, "make test-all": 100, "make test": 30}
_command = "make test-all" if os.environ.get("WINK_HEAVY") else "make test"
if THOROUGH and not LIMIT:
    _command = "make torture"
settings.register_profile(
    "wink",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=EXAMPLES[_command],
    derandomize=not THOROUGH,
)
settings.load_profile("wink")

SAMPLED = 5
"""Where a test has many similar cases, `make test` runs one in so many of them."""


def pytest_report_header() -> str | None:
    if os.environ.get("WINK_HEAVY"):
        return None
    return "heavy tests, and most cases of sampled ones, are left out: `make test-all` runs them"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("WINK_HEAVY"):
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in sorted(items, key=lambda each: each.nodeid):
        if "sampled" in item.keywords:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = {item for item in items if "heavy" in item.keywords}
    for found in cases.values():
        if len(found) > SAMPLED:
            left_out.update(each for number, each in enumerate(found) if number % SAMPLED)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=sorted(left_out, key=lambda each: each.nodeid))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not is_time_left():
        pytest.skip("the time of `make torture` is over")
    if THOROUGH:
        core.global_force_seed = dice(item.nodeid).getrandbits(64)


def pytest_collection_finish() -> None:
    """Leave what collecting made, half a million objects that stay, out of every later search."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _collected() -> Iterator[None]:
    """What a module leaves unclosed is reported there, not in whatever test runs later."""
    yield
    gc.collect()
    gc.freeze()  # modules and caches, which stay


def pytest_sessionfinish() -> None:
    """Let what has become garbage since be found, and reported, when pytest collects at the end."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def ordinary_user() -> Iterator[OrdinaryUser]:
    """A user who may do nothing special, for tests that run as root."""
    with found_ordinary_user() as user:
        yield user


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server; tests make databases of their own in it, and leave it running."""
    with started_postgres() as server:
        yield server


@pytest.fixture
def home() -> Iterator[Path]:
    """An empty directory of that user."""
    with place_for_others() as place:
        yield place
