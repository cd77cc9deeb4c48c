"""One step on a workspace, in a process that faults are injected into; the exit code tells.

0: done, 3: refused or rolled back, and said so.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

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


def _call(fs: HostFilesystem) -> int:
    tools = wink.ToolRegistry([change], workspace=fs)
    return 0 if tools.execute("change", {"text": TEXT}).success else FAILED


def _command(fs: HostFilesystem) -> int:
    script = (
        "echo by a command >edited; mkdir -p new; echo by a command >new/made;"
        " test ! -e d/moved || mv d/moved new/moved; rm -rf removed"
    )
    return 0 if fs.run(["sh", "-c", script]).returncode == 0 else FAILED


def _external(fs: HostFilesystem) -> int:
    with fs.gate:
        view = fs.fork_in_place()
        view.expect_external()
        root = Path(fs.root)
        (root / "edited").write_text("by another program\n")
        (root / "new").mkdir(exist_ok=True)
        (root / "new/made").write_text("by another program\n")
        if (root / "d/moved").exists():
            (root / "d/moved").rename(root / "new/moved")
        shutil.rmtree(root / "removed", ignore_errors=True)
        fs.merge(view)
    return 0


def _undo(fs: HostFilesystem) -> int:
    fs.undo(fs.history()[-1].call_id)
    return 0


def _rewind(fs: HostFilesystem) -> int:
    return FAILED if fs.revert_to(fs.history()[0].call_id) else 0


def _prune(fs: HostFilesystem) -> int:
    fs.prune(Limits(count=1, newest=0))
    return 0


STEPS: dict[str, Callable[[HostFilesystem], int]] = {
    "call": _call,
    "command": _command,
    "external": _external,
    "undo": _undo,
    "rewind": _rewind,
    "prune": _prune,
}


def work(step: str, root: str, store: str, durability: str = "fast", state: str = "") -> int:
    """Open the workspace, make one step, close it."""
    if state:
        os.environ["XDG_STATE_HOME"] = state
    try:
        safe = durability == "safe"
        with HostFilesystem(root, store=store, durability="safe" if safe else "fast") as fs:
            return STEPS[step](fs)
    except (WinkError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return FAILED
