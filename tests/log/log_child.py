"""Appends operations to a log until told to stop, or until a fault; its exit code counts them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from weakincentives.errors import LogUnavailable
from weakincentives.log import CallRecord, Change, Entry, Log, Operation

STOPPED = 100
"""Added to the exit code after an error."""


def operation(number: int, parent: int) -> Operation:
    """Return an operation with several rows, so that half of one would be noticed."""
    text = f"content {number}\n"
    entry = Entry("file", 0o644, size=len(text), content=f"{number:064x}")
    return Operation(
        id=f"operation-{number}",
        number=0,
        parent=parent,
        call=CallRecord(
            id=f"call-{number}",
            session="s",
            tool="write",
            arguments="{}",
            answer="done " * 200,
            outcome="committed",
            started=1.0,
            duration=0.5,
        ),
        changes=tuple(Change((f"{name}.txt",), None, entry) for name in "abc"),
    )


def main(path: str, count: str) -> int:
    done = 0
    try:
        log = Log(Path(path))
        for number in range(1, int(count) + 1):
            log.append(operation(number, log.head()), contents=[b"x" * 3000 + bytes([number])])
            done = number
        log.close()
    except LogUnavailable:
        return STOPPED + done
    return done


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))
