"""A test that asks for ``make`` runs once over each kind of filesystem."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from forks import ensure_running
from trees import KINDS, filesystem


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Which filesystem the test runs over."""
    return request.param


@pytest.fixture
def make(kind: str) -> Iterator[Callable[..., Any]]:
    """Make a filesystem from files, as often as needed; all are closed at the end."""
    with contextlib.ExitStack() as stack:
        yield functools.partial(_make, stack, kind)


def _make(stack: contextlib.ExitStack, kind: str, *args: Any, **kwargs: Any) -> Any:
    return stack.enter_context(filesystem(kind, *args, **kwargs))


@pytest.fixture(scope="session")
def forkserver() -> None:
    """Have the process run that others are forked from, before a test changes directory."""
    ensure_running()
