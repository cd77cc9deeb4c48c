"""Processes that work on branches and are killed over it."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from killed_child import Death

from weakincentives.errors import MergeConflict, NoSuchBranch, UndoRefused
from weakincentives.filesystem import Branch, HostFilesystem, drop_branch

# One deed, killed at one of its system calls


def _on_branch(deed: Callable[[Branch], object]) -> Callable[[Path], None]:
    def do(root: Path) -> None:
        branch = Branch.open(root, "b")
        deed(branch)
        branch.close()

    return do


def _merge(root: Path) -> None:
    with HostFilesystem(root) as fs:
        branch = Branch.open(root, "b")
        branch.merge_into(fs)
        branch.close()


def _change_all(branch: Branch) -> None:
    view = branch.fork()
    view.write("a", "both\n" * 3000)
    view.move("d", "e")
    view.delete("moved")
    branch.merge(view)


DEEDS: dict[str, Callable[[Path], None]] = {
    "create": lambda root: Branch.create(root, "new").close(),
    "drop": lambda root: drop_branch(root, "b"),
    "open": _on_branch(lambda branch: None),
    "write": _on_branch(lambda branch: branch.write("one", "written\n")),
    "a call": _on_branch(_change_all),
    "command": _on_branch(lambda branch: branch.run("rm moved; echo made > d/made; ln -s a link")),
    "undo": _on_branch(lambda branch: branch.undo(branch.history()[-1].call_id)),
    "rebase": _on_branch(lambda branch: branch.rebase()),
    "begin anew": _on_branch(lambda branch: branch.begin_anew()),
    "merge": _merge,
}


def do(deed: str, root: Path, death: Death, reports: Connection) -> None:
    """Do one thing, and say that it is done."""
    os.umask(0o022)
    try:
        death.arm()
        DEEDS[deed](root)
        reports.send("done")
    except Exception:
        reports.send(traceback.format_exc())


# An agent among others: reads files, writes what follows from them, and merges


@dataclass(frozen=True, slots=True)
class Agent:
    """What one of several processes does on a branch of its own."""

    root: Path
    name: str
    seed: int
    tasks: int
    files: int
    death: Death | None = None


def line(agent: str, task: int, read: dict[str, int]) -> str:
    """What a task adds to a file: who, which, and how long each file was that it read."""
    seen = ",".join(f"{path}={length}" for path, length in sorted(read.items()))
    return f"{agent}:{task}:{seen}\n"


def run(agent: Agent, reports: Connection) -> None:
    """Do the tasks that are not done yet; each is one merge."""
    try:
        if agent.death is not None:
            agent.death.arm()
        _work(agent)
        reports.send("done")
    except Exception:
        reports.send(traceback.format_exc())


def _work(agent: Agent) -> None:
    try:
        branch = Branch.open(agent.root, agent.name, wait=30)
    except NoSuchBranch:
        branch = Branch.create(agent.root, agent.name, wait=30)
    for task in range(agent.tasks):
        while not _is_done(agent, task):
            dice = random.Random(f"{agent.seed} {agent.name} {task}")
            branch.begin_anew()
            paths = [f"f{number}" for number in range(agent.files)]
            reads = dice.sample(paths, dice.randint(1, 3))
            view = branch.fork()
            texts = {path: view.read(path) if view.exists(path) else "" for path in reads}
            seen = {path: text.count("\n") for path, text in texts.items()}
            for path in dice.sample(reads, dice.randint(1, len(reads))):
                view.write(path, texts[path] + line(agent.name, task, seen))
            with contextlib.suppress(MergeConflict):  # a killed merge was rolled back meanwhile
                branch.merge(view)
                _try_to_merge(agent, branch)
    branch.close()


def _try_to_merge(agent: Agent, branch: Branch) -> None:
    with HostFilesystem(agent.root, wait=60) as fs:
        try:
            branch.merge_into(fs, strict=True)
        except MergeConflict:
            # Rebased, what it wrote still follows from what it read before: it begins again.
            return


def _is_done(agent: Agent, task: int) -> bool:
    mark = f"{agent.name}:{task}:"
    with HostFilesystem(agent.root, wait=60) as fs:
        return any(mark in fs.read(each.path) for each in fs.list())


# An agent beside a person who edits the same files: each has a line of its own


def edit_own_line(text: str, name: str, value: str) -> str:
    """Return a text whose line of this name has another value."""
    return "".join(
        f"{name}: {value}\n" if line.startswith(f"{name}:") else line
        for line in text.splitlines(keepends=True)
    )


def edit_and_merge(root: Path, name: str, rounds: int, files: int, reports: Connection) -> None:
    """Edit a line and merge, so many times; reports how many merges there were."""
    merged = 0
    try:
        dice = random.Random(name)
        branch = Branch.create(root, name, wait=60)
        for number in range(rounds):
            branch.begin_anew()
            for path in dice.sample([f"f{each}" for each in range(files)], dice.randint(1, files)):
                branch.write(path, edit_own_line(branch.read(path), name, str(number)))
            with (
                contextlib.suppress(MergeConflict),
                HostFilesystem(root, shared=True, wait=60) as fs,
            ):
                branch.merge_into(fs)
                merged += 1
        branch.close()
        reports.send(merged)
    except Exception:
        reports.send(traceback.format_exc())


# One step of a random history


@dataclass(frozen=True, slots=True)
class Change:
    """A file that is written, deleted or moved, having read what is there."""

    path: str
    text: str | None = None
    to: str | None = None
    reads: tuple[tuple[str, str], ...] = ()

    def make(self, fs: HostFilesystem) -> None:
        for path, text in self.reads:
            assert fs.read(path) == text
        if self.to is not None:
            fs.move(self.path, self.to, overwrite=True)
        elif self.text is not None:
            fs.write(self.path, self.text)
        else:
            fs.delete(self.path)


Opened = Callable[[str], Branch]
"""Returns a branch by its name."""


def change_in_call(change: Change, fs: HostFilesystem, opened: Opened) -> None:
    with fs.gate:
        view = fs.fork_in_place()
        change.make(view)
        fs.merge(view)


def change_on_branch(change: Change, name: str, fs: HostFilesystem, opened: Opened) -> None:
    change.make(opened(name))


def undo(call_id: str, fs: HostFilesystem, opened: Opened) -> None:
    fs.undo(call_id)


def rewind(call_id: str, fs: HostFilesystem, opened: Opened) -> tuple[str, ...]:
    return fs.revert_to(call_id)


def create(name: str, serial: int, fs: HostFilesystem, opened: Opened) -> None:
    Branch.create(fs.root, name, at=serial).close()


def drop(name: str, fs: HostFilesystem, opened: Opened) -> None:
    drop_branch(fs.root, name)


def merge(name: str, fs: HostFilesystem, opened: Opened) -> None:
    opened(name).merge_into(fs)


def rebase(name: str, fs: HostFilesystem, opened: Opened) -> None:
    opened(name).rebase()


def begin_anew(name: str, fs: HostFilesystem, opened: Opened) -> None:
    opened(name).begin_anew()


Deed = Callable[[HostFilesystem, Opened], object]


REFUSED = 3
"""The exit code of a process whose deed was refused."""


def do_and_die(root: Path, deed: Deed, death: Death) -> None:
    """Do one of these, and be killed over it."""
    death.arm()
    with HostFilesystem(root) as fs, contextlib.ExitStack() as stack:
        try:
            deed(fs, lambda name: stack.enter_context(contextlib.closing(Branch.open(root, name))))
        except (MergeConflict, UndoRefused):
            sys.exit(REFUSED)
