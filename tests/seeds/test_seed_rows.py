"""Every row of the tables, lists and types of the specs is a test: what it promises is so."""

from __future__ import annotations

import importlib

import pytest
from seed_rows import PROMISES, Row, promise_of, seed_rows

for module in ("rows_chapter", "rows_runtime", "rows_protocol", "rows_policy"):
    importlib.import_module(module)
ROWS = seed_rows()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.label)
def test_seed_row(row: Row) -> None:
    """The row's promise is kept."""
    promise = promise_of(row)
    assert promise is not None, f"write a test for {row}"
    promise(row)


def test_every_promise_is_about_a_row() -> None:
    rows = {(row.document, row.heading, row.name) for row in ROWS}
    headings = {(row.document, row.heading, "") for row in ROWS}
    assert PROMISES.keys() <= rows | headings


def test_the_rows_of_all_tables_are_found() -> None:
    """A parser that overlooks rows would make all of this pass."""
    by_heading: dict[tuple[str, str], int] = {}
    for row in ROWS:
        key = row.document, row.heading
        by_heading[key] = by_heading.get(key, 0) + 1
    assert by_heading[("002", "Runtime Dispatch")] == 11
    assert by_heading[("002", "Exception Handling")] == 6
    assert by_heading[("003", "BackoffStrategy")] == 5
    assert by_heading[("003", "RetryPolicies")] == 5
    assert by_heading[("003", "Precondition")] == 5
    assert by_heading[("003", "Effect")] == 4
    assert by_heading[("003", "ToolRegistry")] == 10
    assert by_heading[("003", "error codes")] == 9
    assert by_heading[("004", "PolicyState (Session Slice)")] == 3
    assert by_heading[("000", "What Gets Rolled Back")] == 5
    assert by_heading[("000", "Rendering Results")] == 6
    assert by_heading[("002", "places")] == 4
    for composed in ("sequence", "parallel", "conditional", "webScrapeTool", "fileWriteTool"):
        assert by_heading[("003", composed)] == 7
    assert len(ROWS) == 336
