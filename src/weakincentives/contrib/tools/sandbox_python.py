"""Runs inside of a sandbox: takes Python code from its input, runs it, and tells its value.

It is handed over as text, so it imports only what Python brings along.
"""

from __future__ import annotations

import ast
import json
import sys
import traceback
from types import TracebackType

__all__ = ["main"]

NAME = "<code>"


def main() -> None:
    """Run the code; what its last expression gives is written behind a mark at the end."""
    request = json.load(sys.stdin)
    try:
        value = run(request["code"])
    except Exception as error:
        # Without the frames of this program.
        error.__traceback__ = _own(error.__traceback__)
        traceback.print_exception(error)
        sys.exit(1)
    shown = "" if value is None else repr(value)
    most = request["most"]
    if len(shown) > most:
        shown = f"{shown[:most]}... ({len(shown)} characters)"
    sys.stdout.write(request["mark"] + shown)


def run(code: str) -> object:
    """Return the value of the last statement if that is an expression, else None."""
    tree = ast.parse(code, NAME)
    names = {"__name__": "__main__"}
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(tree, NAME, "exec"), names)
        return None
    tree.body.pop()
    exec(compile(tree, NAME, "exec"), names)
    return eval(compile(ast.Expression(last.value), NAME, "eval"), names)


def _own(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename != NAME:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main()
