"""Every adapter of the library does what every adapter must, and the docs say so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from under_test import ADAPTERS, PAGE, cells, missing, outcome, page
from wire import WireServer

from weakincentives.testing import AdapterCase, adapter_cases

pytestmark = pytest.mark.sampled

# Each format is run lightly in one way.
ALSO_HEAVY = {("OpenAI, chat", False), ("OpenAI, responses", True)}
ITS_WARNINGS = [
    pytest.mark.filterwarnings("ignore:Item .* on TypedDict class"),
    pytest.mark.filterwarnings("ignore:Accessing the 'model_"),
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings"),
]
"""Of LiteLLM, which is not written for an interpreter that takes warnings for errors."""


@pytest.fixture(scope="module")
def server() -> Iterator[WireServer]:
    with WireServer() as server:
        yield server


@pytest.fixture(scope="module")
def documented() -> dict[tuple[str, str], str]:
    return cells(PAGE.read_text("utf-8"))


def _ways() -> Iterator[Any]:
    """Yield each adapter, streaming and not, with the marks of its tests."""
    for adapter in ADAPTERS:
        for streaming in (False, True):
            marks: list[pytest.MarkDecorator] = []
            if adapter == "Claude Agent SDK":
                marks = [pytest.mark.heavy]
            elif adapter == "LiteLLM" or (adapter, streaming) in ALSO_HEAVY:
                marks = [pytest.mark.heavy, *ITS_WARNINGS]
            name = f"{adapter}, streaming" if streaming else adapter
            yield pytest.param(adapter, streaming, marks=marks, id=name)


@pytest.mark.parametrize(("adapter", "streaming"), list(_ways()))
@pytest.mark.parametrize("case", adapter_cases(), ids=str)
def test_an_adapter_does_what_the_table_says(
    case: AdapterCase,
    adapter: str,
    streaming: bool,
    server: WireServer,
    documented: dict[tuple[str, str], str],
    tmp_path: Path,
):
    if (package := missing(adapter)) is not None:
        pytest.skip(f"needs {package}, which is an extra")

    came = outcome(adapter, case, streaming=streaming, server=server, folder=tmp_path)

    assert documented[case.name, adapter] == came, "run `python tests/adapters/under_test.py`"


def test_the_table_is_the_page_that_its_cells_make(documented: dict[tuple[str, str], str]):
    assert page(documented) == PAGE.read_text("utf-8")
