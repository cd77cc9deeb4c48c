"""Every row of the protocol table names tests that prove it, and they exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from seed_rows import seed_rows

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("protocol_table.md")
_TEST = re.compile(r"`([\w/]+\.py)::([\w:]+)(?:\[([^\]]+)\])?`")


def rows() -> list[list[str]]:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    table = [line for line in lines if line.startswith("| ")]
    return [re.split(r" \| ", line.strip("| ")) for line in table[1:]]


@cache
def known_in(path: str) -> frozenset[str]:
    """Return the tests of a file: functions, and methods as ``Class::method``."""
    tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{each.name}" for each in node.body if hasattr(each, "name")}
    return frozenset(name for name in found if name.rpartition(":")[2].startswith("test_"))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_row_names_tests_that_exist(row: list[str]) -> None:
    assert len(row) == 4, "Protocol, ours, what differs, proved by"
    named = _TEST.findall(row[3])
    assert named, f"name a test that proves the row {row[0]}"
    assert _TEST.sub("", row[3]).strip(" ,") == "", "only tests stand in the last column"
    labels = {each.label for each in seed_rows()}
    for path, name, parameter in named:
        assert name in known_in(path), f"{path} has no {name}"
        assert not parameter or parameter in labels, f"there is no row {parameter}"


def test_the_table_is_found() -> None:
    assert len(rows()) == 28
