"""Deeds of every kind on a workspace, by name and seed: the same again on its twin.

A deed is one transaction: a call, a command, a merge, going back, or a garbage collection.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from weakincentives.errors import FilesystemError, UndoRefused
from weakincentives.filesystem import Branch, HostFilesystem, Limits, drop_branch

PATHS = ("a", "b", "d/a", "d/b", "d/in/c", "e/a", "e/in/c")
DIRECTORIES = ("d", "d/in", "e", "e/in")


class Deed(NamedTuple):
    """What is to be done; the seed says with which paths and texts."""

    kind: str
    seed: int


def _texts(dice: random.Random) -> str:
    return f"{dice.random()}\n" * dice.choice([1, 1, 40, 4000])


def _steps(fs: HostFilesystem, dice: random.Random) -> None:
    for _ in range(dice.randint(1, 4)):
        path, other = dice.sample(PATHS, 2)
        kind = dice.choice(["write", "write", "append", "delete", "delete all", "move"])
        try:
            if kind == "write":
                fs.write(path, _texts(dice))
            elif kind == "append":
                fs.append(path, "appended\n")
            elif kind == "delete":
                fs.delete(path)
            elif kind == "delete all":
                fs.delete(dice.choice(DIRECTORIES), recursive=True)
            else:
                fs.move(path, other, overwrite=True)
        except FilesystemError:  # it is not there, or something is in the way
            continue


def _script(dice: random.Random) -> str:
    one, two, three = dice.sample(PATHS, 3)
    directory = dice.choice(DIRECTORIES)
    size = dice.choice([10, 500, 60_000])
    return (
        f"mkdir -p $(dirname {one}); yes {dice.random()} | head -c {size} >{one} || true;"
        f" test -d {two} || rm -f {two}; test ! -e {three} || chmod 600 {three};"
        f" {f'rm -rf {directory}' if dice.random() < 0.3 else 'true'}"
    )


def _call(fs: HostFilesystem, dice: random.Random) -> None:
    with fs.gate:
        view = fs.fork_in_place()
        _steps(view, dice)
        fs.merge(view) if dice.random() < 0.8 else fs.discard(view)


def _command(fs: HostFilesystem, dice: random.Random) -> None:
    fs.run(["sh", "-c", _script(dice)])


def _external(fs: HostFilesystem, dice: random.Random) -> None:
    with fs.gate:
        view = fs.fork_in_place()
        view.expect_external()
        words = ["sh", "-c", _script(dice)]
        subprocess.run(words, cwd=fs.root, stderr=subprocess.DEVNULL, check=False)
        fs.merge(view) if dice.random() < 0.8 else fs.discard(view)


def _merge(fs: HostFilesystem, dice: random.Random) -> None:
    with fs.gate:
        view = fs.fork()
        _steps(view, dice)
        fs.merge(view)


def _branch(fs: HostFilesystem, dice: random.Random) -> None:
    branch = Branch.create(fs.root, f"side-{dice.randrange(10**9)}")
    try:
        _steps(branch, dice)
        branch.merge_into(fs)
    finally:
        branch.close()
        drop_branch(fs.root, branch.info.name)


def _undo(fs: HostFilesystem, dice: random.Random) -> None:
    calls = fs.history()
    if calls:
        fs.undo(calls[-1 - dice.randrange(min(3, len(calls)))])


def _rewind(fs: HostFilesystem, dice: random.Random) -> None:
    calls = fs.history()
    if calls:
        fs.revert_to(calls[-1 - dice.randrange(min(4, len(calls)))].call_id)


def _gc(fs: HostFilesystem, dice: random.Random) -> None:
    fs.prune(Limits(count=dice.randint(3, 12), newest=0))


DEEDS: dict[str, Callable[[HostFilesystem, random.Random], None]] = {
    "call": _call,
    "command": _command,
    "external": _external,
    "merge": _merge,
    "branch": _branch,
    "undo": _undo,
    "rewind": _rewind,
    "gc": _gc,
}


def do(fs: HostFilesystem, deed: Deed) -> str:
    """Make a deed; returns what it was refused with, if it was."""
    try:
        DEEDS[deed.kind](fs, random.Random(deed.seed))
    except (FilesystemError, UndoRefused) as error:
        return type(error).__name__
    return ""


def live(root: Path, state: Path, deeds: list[Deed], reports: Connection) -> None:
    """Make deeds one after the other, and report how each ended."""
    os.setpgid(0, 0)
    os.environ["XDG_STATE_HOME"] = str(state)
    os.umask(0o022)
    try:
        with HostFilesystem(root) as fs:
            reports.send("")
            for deed in deeds:
                reports.send(do(fs, deed))
    except Exception:
        reports.send(traceback.format_exc())


def execute(root: Path, state: Path, seed: int, reports: Connection) -> None:
    """Run a program by `wink exec`."""
    from weakincentives.cli.entry import main

    os.setpgid(0, 0)
    os.environ["XDG_STATE_HOME"] = str(state)
    os.chdir(root)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    reports.send("")
    sys.argv[:] = ["wink"]
    with contextlib.suppress(SystemExit):
        main(["exec", "--", "sh", "-c", _script(random.Random(seed))])
    reports.send("")
