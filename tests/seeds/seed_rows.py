"""The rows of the seed documents: of tables, of lists that say what happens, of TypeScript types.

Each row is a promise of its own, and a test of its own: see ``test_seed_rows``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from seed_blocks import document_text, without_fences

LISTS = {
    "000": ("Tool Contracts", "Why Type Parameters Matter", "Resource Management",
            "Rendering Results", "Exception Handling", "Stage 1: Automatic Schema Validation",
            "How Errors Propagate Through Adapters", "Transaction Rollback on Errors",
            "Example: VFS Tool Suite", "Transaction Lifecycle", "ReadBeforeWritePolicy",
            "Key Behaviors"),
    "002": ("ToolResult", "Prompt Rendering", "Runtime Dispatch", "ToolResult Contract",
            "Handler Validation", "Limitations"),
    "003": (),
    "004": ("Guiding Principles", "State Management", "Limitations"),
}  # fmt: skip
"""The lists that promise something, by the heading they stand under; all tables do."""

_HEADING = re.compile(r"#+ +(.*)")
_ITEM = re.compile(r"(?:\d+\.|-) +(.*)")
_TYPE = re.compile(r"(?:interface|type) (\w+)[^\n]*?[{=] *\n(.*?)\n(?:\}|(?=\n))", re.DOTALL)
_MEMBER = re.compile(r"^  (?:async )?(\w+)\??[:(]", re.MULTILINE)
_KIND = re.compile(r"^  \| (\w+)", re.MULTILINE)
_CODE = re.compile(r"code: '([A-Z_]+)'")
_POLICY = re.compile(r"^  ([A-Z]+): [{(]", re.MULTILINE)
_BACKOFF = re.compile(r"\{ type: '(\w+)'")
_PLACE = re.compile(r"At `src/weakincentives/([\w/]+\.py)` \(`(\w+)` class\)")
_COMPOSED = re.compile(
    r"\n  (sequence|parallel|conditional)\(.*?return \{\n(.*?)\n\s+async execute", re.DOTALL
)
_COMPOSED_MEMBER = re.compile(r"^ {6}(\w+): ", re.MULTILINE)
_EXAMPLE = re.compile(r"const (\w+Tool): Tool = \{\n(.*?)\n\s+async execute", re.DOTALL)
_EXAMPLE_MEMBER = re.compile(r"^  (\w+): ", re.MULTILINE)
_PRIVATE = re.compile(r"\n(?:interface|class) (\w+)[^\n]* \{\n(.*?)\n\}", re.DOTALL)
_PRIVATE_MEMBER = re.compile(r"^  (?:private (\w+)\(|async (\w+)<)", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """One row: of a table, a list, or a type."""

    document: str
    heading: str
    name: str
    """The first cell, the item, or the member's name, without its marks."""
    cells: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        words = re.sub(r"[^a-z0-9]+", "-", f"{self.heading} {self.name}".lower()).strip("-")
        return f"{self.document}-{words[:70]}"


def seed_rows() -> tuple[Row, ...]:
    """Return every row of the Chapter, the specs and the Protocol, in reading order."""
    rows = (
        *_rows_of("000"),
        *_rows_of("002"),
        *(
            Row("002", "places", name, (path,))
            for path, name in _PLACE.findall(document_text("002"))
        ),
        *_protocol_rows(document_text("003")),
        *_rows_of("004"),
    )
    return tuple(dict.fromkeys(rows))


def _rows_of(document: str) -> Iterator[Row]:
    heading = ""
    is_header = True
    text = without_fences(document_text(document))
    text = re.sub(r"\n  +", " ", text)  # an item that goes on
    for line in text.splitlines():
        if found := _HEADING.fullmatch(line):
            heading = found[1]
        if not line.startswith("|"):
            is_header = True
            if (item := _ITEM.fullmatch(line)) and heading in LISTS[document]:
                yield Row(document, heading, _plain(item[1]))
            continue
        cells = tuple(_plain(cell) for cell in re.split(r"(?<!\\)\|", line)[1:-1])
        if is_header:
            is_header = False
        elif not set(line) <= set("|- "):
            yield Row(document, heading, cells[0], cells[1:])


def _plain(text: str) -> str:
    return re.sub(r"[`*]|\\(?=[|<])", "", text).strip()


def _protocol_rows(text: str) -> Iterator[Row]:
    for name, body in _TYPE.findall(text):
        for member in (*_MEMBER.findall(body), *_KIND.findall(body)):
            yield Row("003", name, member)
        if name == "BackoffStrategy":
            for kind in _BACKOFF.findall(body):
                yield Row("003", name, kind)
    (policies,) = re.findall(r"const RetryPolicies = \{\n(.*?)\n\} as const", text, re.DOTALL)
    for name in _POLICY.findall(policies):
        yield Row("003", "RetryPolicies", name)
    for code in _CODE.findall(text):
        yield Row("003", "error codes", code)
    for name, body in _PRIVATE.findall(text):
        for private, generic in _PRIVATE_MEMBER.findall(body):
            yield Row("003", name, private or generic)
    for composed, body in _COMPOSED.findall(text):
        for member in _COMPOSED_MEMBER.findall(body):
            yield Row("003", composed, member)
    for example, body in _EXAMPLE.findall(text):
        for member in _EXAMPLE_MEMBER.findall(body):
            yield Row("003", example, member)


# What keeps a row's promise

Promise = Callable[[Row], None]

PROMISES: dict[tuple[str, str, str], Promise] = {}


def promise(document: str, heading: str, *names: str) -> Callable[[Promise], Promise]:
    """Declare the test of rows; without names, of all rows under a heading."""

    def declare(function: Promise) -> Promise:
        for name in names or ("",):
            key = (document, heading, name)
            assert key not in PROMISES, f"two tests for {key}"
            PROMISES[key] = function
        return function

    return declare


def promise_of(row: Row) -> Promise | None:
    """Return the test of a row."""
    own = PROMISES.get((row.document, row.heading, row.name))
    return own or PROMISES.get((row.document, row.heading, ""))
