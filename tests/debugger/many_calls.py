"""A run of many calls on many files, made through the registry and saved as any run is.

``python tests/debugger/many_calls.py DIRECTORY [CALLS] [FILES]`` makes one, to measure by hand.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path

import weakincentives as wink
from weakincentives.core.budget import TokenUsage
from weakincentives.core.call import ToolCall
from weakincentives.filesystem import HostFilesystem
from weakincentives.filesystem.store import location_of
from weakincentives.runtime import SavedSession, ToolRegistry
from weakincentives.runtime.calls import Run, begin_run
from weakincentives.runtime.conversation import Message

_PER_TURN = 4


@dataclass(frozen=True)
class Progress:
    done: int


@wink.tool(reach="reversible")
def edit(path: str, line: int, text: str, *, context: wink.ToolContext) -> str:
    """Replace a line of a file."""
    lines = context.filesystem.read(path).splitlines(keepends=True)
    lines[line % len(lines)] = f"{text}\n"
    context.filesystem.write(path, "".join(lines))
    context.session[Progress].seed(Progress(line))
    return f"Edited {path}"


@wink.tool(reach="read")
def view(path: str, *, context: wink.ToolContext) -> str:
    """Return a file."""
    return context.filesystem.read(path)


@wink.tool(reach="reversible")
def spoil(path: str, *, context: wink.ToolContext) -> str:
    """Write a file, and fail."""
    context.filesystem.write(path, "")
    raise ValueError(f"{path} must not be empty")


def make_run(workspace: Path, *, calls: int, files: int, lines: int = 40) -> Run:
    """Fill a directory with files, and let a run make calls on them."""
    pick = random.Random(1)
    names = [f"src/p{n % 70}/m{n}.py" for n in range(files)]
    for name in names:
        path = workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"value_{n} = {n}\n" for n in range(lines)))
    with (
        _begun(workspace) as saved,
        ToolRegistry([edit, view, spoil], workspace=workspace, session=saved.session) as tools,
    ):
        session = saved.session
        session.dispatch(Message(role="user", text="Improve it", is_first=True, conversation="c"))
        for first in range(0, calls, _PER_TURN):
            wanted = [_wanted(pick, names, n) for n in range(first, min(first + _PER_TURN, calls))]
            session.dispatch(
                Message(
                    role="model",
                    text=f"Next I look at step {first}. " + "Because of this and that. " * 4,
                    tool_calls=tuple(wanted),
                    conversation="c",
                    usage=TokenUsage(input_tokens=9_000, output_tokens=120),
                )
            )
            for call in wanted:
                result = tools.execute(call.name, call.params, call_id=call.id)
                session.dispatch(
                    Message(role="tool", call_id=call.id, text=result.render(), conversation="c")
                )
        return Run(saved.path)


def _begun(workspace: Path) -> SavedSession:
    HostFilesystem(workspace).close()  # makes the store
    about = {"kind": "run", "task": "Improve it", "model": "scripted"}
    return begin_run(location_of(workspace), about)


def _wanted(pick: random.Random, names: list[str], number: int) -> ToolCall:
    path, kind = pick.choice(names), pick.random()
    if kind < 0.6:
        arguments = {"path": path, "line": number, "text": f"value = {number}"}
        return ToolCall("edit", arguments, f"call_{number}")
    return ToolCall("view" if kind < 0.95 else "spoil", {"path": path}, f"call_{number}")


if __name__ == "__main__":
    sizes = [int(each) for each in sys.argv[2:]]
    made = make_run(
        Path(sys.argv[1]), calls=(sizes or [10_000])[0], files=(sizes[1:] or [5_000])[0]
    )
    sys.stdout.write(f"{made.path}\n")
