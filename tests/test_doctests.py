"""Every example in a docstring runs as printed."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import weakincentives
from weakincentives.errors import MissingExtra

MODULES = [
    weakincentives.__name__,
    *(m.name for m in pkgutil.walk_packages(weakincentives.__path__, "weakincentives.")),
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run_as_printed(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("weakincentives"):
            raise
        pytest.skip(f"needs {error.name}, which is an extra")
    except MissingExtra as error:  # an integration: its framework is not installed here
        pytest.skip(str(error))

    failed, _ = doctest.testmod(module)

    assert failed == 0
