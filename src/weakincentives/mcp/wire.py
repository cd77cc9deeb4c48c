"""Standard input and output, kept for the protocol alone. Loads nothing: it is claimed first."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple


class Wire(NamedTuple):
    """Where a client is: what it writes is read from one descriptor, and answered on the other."""

    incoming: int
    outgoing: int


@contextmanager
def claimed_wire() -> Generator[Wire]:
    """Keep standard input and output for the protocol.

    Until the end of the block, what anybody prints goes to standard error, also a program that a
    tool starts; and whoever reads standard input finds it empty.
    """
    wire = Wire(os.dup(0), os.dup(1))
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        yield wire
    finally:
        os.dup2(wire.incoming, 0)
        os.dup2(wire.outgoing, 1)
        os.close(nothing)
        os.close(wire.outgoing)
        # The other one is not closed: a thread may still read there, and the number must not
        # become another file's.
