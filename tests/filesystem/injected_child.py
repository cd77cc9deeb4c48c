"""One step on a workspace, in a process that faults are injected into; the exit code tells.

0: done, 3: refused or rolled back, and said so.
"""

from __future__ import annotations

import os
import sys

import weakincentives as wink
from weakincentives.errors import WinkError
from weakincentives.filesystem import HostFilesystem, Limits

FAILED = 3
TEXT = "written by the child\n"


@wink.tool(reach="reversible")
def change(text: str, *, context: wink.ToolContext) -> str:
    """Write, create, move and remove files."""
    fs = context.filesystem
    fs.write("edited", text)
    fs.write("new/made", text)
    here, there = ("d/moved", "new/moved") if fs.exists("d/moved") else ("new/moved", "d/moved")
    fs.move(here, there)
    fs.delete("removed", recursive=True) if fs.exists("removed") else fs.write("removed/one", text)
    return "changed"


def main(step: str, root: str, store: str) -> int:
    try:
        with HostFilesystem(root, store=store) as fs:
            if step == "call":
                tools = wink.ToolRegistry([change], workspace=fs)
                return 0 if tools.execute("change", {"text": TEXT}).success else FAILED
            if step == "undo":
                fs.undo(fs.history()[-1].call_id)
            elif step == "prune":
                fs.prune(Limits(count=1, newest=0))
    except (WinkError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return FAILED
    return 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # what the interpreter does at its end is not under test
