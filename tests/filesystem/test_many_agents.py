"""Several agents on one directory, each on a branch of its own, killed at random.

Each task reads some files and adds to some of them a line that says how long the files were. So
the files themselves tell which state a task has seen, and the history tells in which order the
merges came.
"""

from __future__ import annotations

import random
import tempfile
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import branch_child
import pytest
from branch_child import Agent, edit_own_line
from forks import processes
from killed_child import Death

from chance import SEED, THOROUGH
from weakincentives.filesystem import Branch, HostFilesystem, branches_of, drop_branch
from weakincentives.filesystem.tree import wait_until

pytestmark = pytest.mark.usefixtures("forkserver")

SEEDS = range(SEED, SEED + (1000 if THOROUGH else 5))
AGENTS, TASKS, FILES = 8, 2, 4


class Running:
    """A process of an agent."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self._reports, sending = processes.Pipe(duplex=False)
        self._process = processes.Process(target=branch_child.run, args=(agent, sending))
        self._process.start()
        sending.close()

    def wait(self) -> bool:
        """Return whether it did all its tasks; False if it was killed."""
        try:
            told = self._reports.recv()
        except EOFError:
            told = None
        self._process.join()
        self._process.close()
        self._reports.close()
        assert told in (None, "done"), told
        return told == "done"


def let_agents_work(root: Path, seed: int) -> int:
    """Start the agents, again after each kill; returns how many were killed."""
    dice = random.Random(seed)
    names = [f"agent-{number}" for number in range(AGENTS)]

    def start(name: str) -> Running:
        death = Death(dice.randint(5, 200)) if dice.random() < 0.8 else None
        return Running(Agent(root, name, seed, TASKS, FILES, death))

    waiting, kills = [start(name) for name in names], 0
    while waiting:
        first = waiting.pop(0)
        if not first.wait():
            kills += 1
            waiting.append(start(first.agent.name))
    return kills


def check_order(root: Path) -> None:
    """Replay the merges in the order of the history: each must have seen the state before it."""
    files: dict[str, list[str]] = {}
    done: set[str] = set()
    with HostFilesystem(root) as fs:
        merges = fs.history()
        assert {merge.tool for merge in merges} == {"merge"}
        final = {each.path: fs.read(each.path).splitlines() for each in fs.list()}
    for merge in merges:
        after = at(root, merge.serial)
        added = {p: text[len(files.get(p, [])) :] for p, text in after.items()}
        lines = {line for new in added.values() for line in new}
        assert len(lines) == 1, f"not one task: {lines}"
        agent, task, seen = lines.pop().split(":")
        assert f"{agent}:{task}" not in done, "done twice"
        done.add(f"{agent}:{task}")
        for each in seen.split(","):
            path, length = each.split("=")
            assert len(files.get(path, [])) == int(length), f"{agent}:{task} saw an older {path}"
        for path, old in files.items():
            assert after[path][: len(old)] == old, "an update is lost"
        files = after
    assert files == final
    assert done == {f"agent-{a}:{t}" for a in range(AGENTS) for t in range(TASKS)}


def at(root: Path, serial: int) -> dict[str, list[str]]:
    branch = Branch.create(root, "past", at=serial)
    try:
        return {each.path: branch.read(each.path).splitlines() for each in branch.list()}
    finally:
        branch.close()
        drop_branch(root, "past")


@pytest.mark.heavy
@pytest.mark.parametrize("seed", SEEDS)
def test_agents_on_one_directory_come_out_as_one_after_the_other(seed: int) -> None:
    with tempfile.TemporaryDirectory(prefix="wink-test-") as place:
        root = Path(place, "work")
        root.mkdir()
        HostFilesystem(root).close()
        let_agents_work(root, seed)
        check_order(root)
        assert len(branches_of(root)) == AGENTS


_MERGING = 5.0
"""Seconds that a merge takes, on a loaded machine, too."""


class Person:
    """Edits one line of each file, in an editor that knows nothing of us."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.edits = 0
        self.lost: list[str] = []
        self._dice = random.Random(seed)
        self._last: dict[str, str] = {}

    def edit(self) -> None:
        """Edit a file, after a look whether the last edit there is still in place."""
        path = f"f{self._dice.randrange(FILES)}"
        self.check(path)
        place, value = self.root / path, str(self.edits)
        text = edit_own_line(place.read_text(), "person", value)
        if self._dice.random() < 0.5:
            place.write_text(text)
        else:
            staged = self.root / ".saving"
            staged.write_text(text)
            staged.rename(place)
        self._last[path] = value
        self.edits += 1

    def check(self, path: str) -> None:
        value = self._last.get(path)
        if value is not None and not wait_until(lambda: self._has(path, value), _MERGING):
            self.lost.append(f"{path}: {value}")

    def _has(self, path: str, value: str) -> bool:
        # For a moment it may show a merge that is about to be undone.
        return f"person: {value}\n" in (self.root / path).read_text()


def edit_beside_agents(root: Path, seed: int, rounds: int) -> tuple[Person, int]:
    """Let a person edit files while agents merge; returns the person, and the number of merges."""
    names = [f"agent-{number}" for number in range(AGENTS)]
    # Far enough from each other to be merged line by line.
    text = "".join(f"{name}: -\n" + "\n" * 3 for name in (*names, "person"))
    for number in range(FILES):
        (root / f"f{number}").write_text(text)
    HostFilesystem(root).close()
    person, merges = Person(root, seed), 0
    reports: list[tuple[BaseProcess, Connection]] = []
    for name in names:
        receiving, sending = processes.Pipe(duplex=False)
        arguments = (root, name, rounds, FILES, sending)
        process = processes.Process(target=branch_child.edit_and_merge, args=arguments)
        process.start()
        sending.close()
        reports.append((process, receiving))
    for process, receiving in reports:
        while not receiving.poll(0.001):
            person.edit()
        told = receiving.recv()
        process.join()
        assert isinstance(told, int), told
        merges += told
    for number in range(FILES):
        person.check(f"f{number}")
    return person, merges


@pytest.mark.heavy
@pytest.mark.parametrize("seed", [int(SEED)] if SEED else range(20 if THOROUGH else 1))
def test_no_merge_replaces_what_a_person_saves_at_the_same_time(tmp_path: Path, seed: int) -> None:
    root = tmp_path / "work"
    root.mkdir()
    person, merges = edit_beside_agents(root, seed, 20)
    told = f"{person.edits} edits beside {merges} merges"
    assert person.lost == [], told
    assert person.edits > 100, told
    assert merges > 10, told
