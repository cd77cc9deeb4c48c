"""A process that is killed at any instant leaves a workspace that opens as its last call left it.

The child is in `killed_child.py`, and so is the model that says what each call must lead to.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import killed_child
import pytest
from forks import processes
from killed_child import Call, Death, Orders, Seen, Step, Tree, build, fill, look, plan
from trees import elsewhere

from chance import HEAVY, SEED, STRIDE
from weakincentives.filesystem import HostFilesystem

pytestmark = pytest.mark.usefixtures("forkserver")

TORTURE = float(os.environ.get("WINK_TORTURE", "0"))

OURS = ("api", "api", "view", "direct", "command")
ENGINES = (*OURS, "external")


class Workspace:
    """A directory, what it must hold after each call, and the means to kill who works on it."""

    def __init__(self, base: Path, trees: list[Tree], store: Path | None = None) -> None:
        self.root = base / "work"
        self.store = store or base / "store"
        self.killed = base / "as the kill left it"
        self.trees = trees
        self.done = 0
        self.external = False
        self.kills = 0
        self._times: dict[tuple[int, int], int] = {}
        self.root.mkdir()
        build(self.root, trees[0])
        self.check(0, look(self.root))

    def check(self, done: int, seen: dict[str, Seen]) -> None:
        """Fail unless the tree is exactly what that many calls lead to."""
        problems = differences(seen, self.trees[done], self._times)
        assert not problems, f"after call {done}: " + "\n".join(problems)
        for path, node in self.trees[done].items():
            self._times[node.identity, node.version] = seen[path].modified

    def work(self, orders: Orders, kill: KillAt | None = None) -> list[str] | None:
        """Let a child go on with the calls; what it called, or None when it was killed."""
        with child(replace(orders, root=self.root, store=self.store, done=self.done)) as reports:
            for what, seen in reports(kill):
                if what == "done":
                    return seen
                self.done = what
                if seen is not None:
                    self.check(what, seen)
        self.kills += 1
        left = orders.calls[self.done :]
        self.external = bool(left) and left[0].engine == "external"
        self._keep()
        return None

    def reopen(self, death: Death | None, kill: KillAt | None = None) -> bool:
        """Let a child repair the workspace; False when it was killed over that."""
        with child(Orders(self.root, self.store, death=death)) as reports:
            if any(what == "done" for what, _ in reports(kill)):
                return True
        self.kills += 1
        return False

    def recover(self) -> int:
        """Open the workspace and return how many calls it shows: those reported, or one more."""
        with HostFilesystem(self.root, store=self.store) as fs:
            # Where programs are at work on their own, what is undone is set aside and told.
            told = [line for line in fs.recovered if not (self.external and "is now in" in line)]
            assert not told, told
        seen = look(self.root)
        self.done = self._closest(seen)
        self.check(self.done, seen)
        with HostFilesystem(self.root, store=self.store):
            pass
        assert look(self.root) == seen, "opening it once more changed something"
        return self.done

    def _closest(self, seen: dict[str, Seen]) -> int:
        further = self.done + 1
        if further < len(self.trees) and differences(seen, self.trees[self.done], self._times):
            problems = differences(seen, self.trees[further], self._times)
            if len(problems) <= len(differences(seen, self.trees[self.done], self._times)):
                return further
        return self.done

    def _keep(self) -> None:
        # To look at after a failure: opening the workspace changes it. Only root can copy all of
        # it: an overlay's own directory is closed to its user, too. And of a command that is being
        # killed, files may go while they are copied.
        if os.geteuid() != 0:
            return
        shutil.rmtree(self.killed, ignore_errors=True)
        self.killed.mkdir()
        places = filter(Path.exists, (self.root, self.store))
        subprocess.run(["cp", "-a", *places, self.killed], stderr=subprocess.DEVNULL, check=False)


def differences(seen: dict[str, Seen], tree: Tree, times: dict[tuple[int, int], int]) -> list[str]:
    """Name every way in which a directory is not what the model says."""
    groups: dict[int, list[str]] = {}
    for path, node in sorted(tree.items()):
        groups.setdefault(node.identity, []).append(path)
    problems = [f"{path!r} should not be there" for path in seen.keys() - tree.keys()]
    problems += [f"{path!r} is missing" for path in tree.keys() - seen.keys()]
    for path in tree.keys() & seen.keys():
        node, found = tree[path], seen[path]
        expected = Seen(
            node.kind,
            node.mode,
            "" if node.kind == "directory" else killed_child.digest(node.content),
            tuple(groups[node.identity]),
            times.get((node.identity, node.version), found.modified),
        )
        problems += [
            f"{path!r}: {name} should be {want!r} and is {have!r}"
            for name in ("kind", "mode", "digest", "group", "modified")
            if (want := getattr(expected, name)) != (have := getattr(found, name))
        ]
    return sorted(problems)


class KillAt:
    """A moment: so many seconds after so many reports."""

    def __init__(self, reports: int, seconds: float) -> None:
        self.reports = reports
        self.seconds = seconds

    def __repr__(self) -> str:
        return f"KillAt({self.reports}, {self.seconds:.4f})"


@contextlib.contextmanager
def child(orders: Orders):
    """Start a child; gives what yields its reports and may kill it in between.

    On leaving, the process is dead, with all that it started and that keeps its group.
    """
    receiving, sending = processes.Pipe(duplex=False)
    ends, lives = processes.Pipe(duplex=False)
    process = processes.Process(target=killed_child.work, args=(orders, sending, lives))
    process.start()
    sending.close()
    lives.close()

    def reports(kill: KillAt | None) -> Iterator[tuple[Any, Any]]:
        for number in itertools.count():
            if kill is not None and number == kill.reports:
                receiving.poll(kill.seconds)
                end_group(process.pid)
            try:
                what, seen = receiving.recv()
            except (EOFError, ConnectionResetError):
                return
            assert what != "failed", seen
            yield what, seen

    try:
        yield reports
    finally:
        end_group(process.pid)
        process.join()
        with contextlib.suppress(EOFError):
            ends.recv()
        process.close()
        receiving.close()
        ends.close()


def end_group(pid: int) -> None:
    for end in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            end(pid, signal.SIGKILL)


# A random moment


def survive(
    base: Path,
    seed: int,
    kills: int,
    store: Path | None = None,
    engines: Sequence[str] = ENGINES,
) -> int:
    """Kill whoever works on a workspace so many times; returns how often that was."""
    dice = random.Random(seed)
    calls, trees = plan(seed, 40, engines)
    durability = dice.choice(["fast", "fast", "safe"])
    space = Workspace(base, trees, store)
    story: list[object] = []
    try:
        while space.kills < kills:
            death, kill = a_death(dice, 120), None
            if dice.random() < 0.5:
                death, kill = None, KillAt(dice.randint(0, 4), dice.random() * 0.012)
            story.append((space.done, death or kill))
            orders = Orders(base, calls=calls, death=death, durability=durability)
            if space.work(orders, kill) is not None:
                break
            while dice.random() < 0.4:
                death, kill = a_death(dice, 25), None
                if dice.random() < 0.3:
                    death, kill = None, KillAt(0, dice.random() * 0.004)
                story.append(("recovery", death or kill))
                if space.reopen(death, kill):
                    break
            space.recover()
    except BaseException:
        show(f"seed {seed} failed after {story}; see {base}")
        raise
    return space.kills


def a_death(dice: random.Random, steps: int) -> Death:
    return Death(dice.randint(1, steps), torn=dice.random() < 0.3)


def show(text: str) -> None:
    sys.stderr.write(f"\n{text}\n")


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(40 if HEAVY else 6))
def test_a_kill_at_a_random_moment_leaves_the_last_call_or_the_next(tmp_path: Path, seed: int):
    survive(tmp_path, seed, 6 if HEAVY else 4, engines=OURS)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(20 if HEAVY else 2))
def test_a_kill_is_survived_beside_programs_that_change_files_themselves(tmp_path: Path, seed: int):
    survive(tmp_path, seed, 6 if HEAVY else 4)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(2000, 2040 if HEAVY else 2003))
def test_a_kill_is_survived_by_calls_of_other_programs_alone(tmp_path: Path, seed: int):
    survive(tmp_path, seed, 8 if HEAVY else 6, engines=("external",))


@pytest.mark.parametrize("seed", range(1000, 1010 if HEAVY else 1001))
def test_a_kill_is_survived_with_the_store_on_another_filesystem(tmp_path: Path, seed: int):
    with elsewhere(tmp_path) as place:
        survive(tmp_path, seed, 4, place / "store")


if TORTURE:  # `make torture`: fresh seeds are for finding things, not for passing

    def test_torture():
        """Fresh seeds until the time is up; a failure names its seed and keeps its directory."""
        end, kills, seed = time.monotonic() + TORTURE, 0, SEED
        while time.monotonic() < end:
            base = Path(tempfile.mkdtemp(prefix=f"wink-kill-{seed}-"))
            kills += survive(base, seed, 8)
            shutil.rmtree(base)
            seed += 1
        show(f"{kills} kills survived")


# Every instant between two system calls

A_CALL = {
    "write a new file": [Step("write", "new.txt", data=b"new")],
    "write into new directories": [Step("write", "a/b/c/new.txt", data=b"new")],
    "write over a file": [Step("write", "src/app.py", data=fill("over", 9000))],
    "write through a symlink": [Step("write", "links/to_app", data=b"through")],
    "write a hard-linked file": [Step("write", "links/one", data=fill("both", 9000))],
    "append to a hard-linked file": [Step("append", "three", data=b"and so on\n")],
    "write the same file twice": [
        Step("write", "src/app.py", data=b"once"),
        Step("write", "src/app.py", data=b"twice"),
    ],
    "make directories": [Step("mkdir", "a/b/c")],
    "delete a file": [Step("delete", "README.md")],
    "delete a tree": [Step("delete", "src")],
    "delete a hard link": [Step("delete", "links/two")],
    "delete and write again": [
        Step("delete", "src"),
        Step("write", "src/app.py", data=b"another"),
    ],
    "move a file": [Step("move", "README.md", "docs/README.md")],
    "move a file over a file": [Step("move", "src/app.py", "README.md")],
    "move a hard link over a file": [Step("move", "links/one", ".env")],
    "change a hard link and move it": [
        Step("write", "three", data=b"all see it"),
        Step("move", "three", "deep/er/three"),
    ],
    "move a directory over a directory": [Step("move", "src/pkg", "node_modules")],
    "copy a file": [Step("copy", "src/app.py", "docs/app.py")],
    "a bit of everything": [
        Step("write", "src/app.py", data=b"one"),
        Step("move", "src", "lib"),
        Step("write", "lib/app.py", data=b"two"),
        Step("delete", "links"),
        Step("write", "links", data=b"a file now"),
    ],
    "undo a savepoint": [
        Step("write", "src/app.py", data=b"kept"),
        Step(
            "undo",
            inner=(
                Step("write", "src/app.py", data=b"undone"),
                Step("delete", "links"),
                Step("write", "made/in/here", data=b"undone"),
            ),
        ),
        Step("write", "README.md", data=b"kept too"),
    ],
    "keep a savepoint": [
        Step("keep", inner=(Step("delete", "src"), Step("write", "three", data=b"kept"))),
        Step("write", "src/app.py", data=b"after"),
    ],
}
BY_A_PROGRAM = {
    "change a little": [
        Step("write", "src/app.py", data=b"by a program"),
        Step("chmod", "README.md", mode=0o600),
        Step("symlink", "points", data=b"src/app.py"),
    ],
    "turn things over": [
        Step("delete", "src"),
        Step("write", "src", data=b"a file now"),
        Step("delete", "README.md"),
        Step("write", "README.md/inside", data=b"a directory now"),
        Step("move", "node_modules", "lib"),
    ],
}

HARD_LINKS_TAKEN_APART = [
    Step("delete", "links/one"),
    Step("delete", "links/two"),
    Step("delete", "three"),
    Step("write", "three", data=b"another"),
    Step("link", "three", "links/two"),
]

SCENARIOS = [
    *((name, "api", kept, steps) for name, steps in A_CALL.items() for kept in (True, False)),
    *((name, "view", True, steps) for name, steps in A_CALL.items() if "savepoint" not in name),
    *(
        (name, engine, kept, steps)
        for name, steps in BY_A_PROGRAM.items()
        for engine in ("command", "external")
        for kept in (True, False)
    ),
    ("take hard links apart", "external", False, HARD_LINKS_TAKEN_APART),
]
ALWAYS = [
    ("write over a file", "api", True),
    ("write a hard-linked file", "api", False),
    ("move a file over a file", "api", False),
    ("delete and write again", "view", True),
]


def scenarios() -> Iterator[object]:
    """The few that are tried every time, and the many that take minutes."""
    for name, engine, kept, steps in SCENARIOS:
        marks = [] if (name, engine, kept) in ALWAYS else [pytest.mark.heavy]
        label = f"{engine}: {name}, {'kept' if kept else 'rolled back'}"
        yield pytest.param(engine, kept, steps, id=label, marks=marks)


@pytest.mark.parametrize(("engine", "kept", "steps"), list(scenarios()))
def test_a_kill_between_any_two_system_calls_leaves_all_or_nothing(
    tmp_path: Path, engine: str, kept: bool, steps: list[Step]
):
    """Also with a write cut in half, and with the recovery killed at one step or another."""
    kill_everywhere(tmp_path, Call(engine, tuple(steps), kept))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("engine", "kept", "name"),
    [
        ("api", True, "a bit of everything"),
        ("api", False, "a bit of everything"),
        ("api", False, "change a hard link and move it"),
        ("view", True, "move a hard link over a file"),
        ("command", True, "change a little"),
        ("external", False, "turn things over"),
    ],
)
def test_it_does_so_with_the_store_on_another_filesystem(
    tmp_path: Path, engine: str, kept: bool, name: str
):
    steps = A_CALL.get(name) or BY_A_PROGRAM[name]
    with elsewhere(tmp_path) as place:
        kill_everywhere(tmp_path, Call(engine, tuple(steps), kept), place)


def kill_everywhere(base: Path, call: Call, away: Path | None = None) -> None:
    """Kill a call at every step; with the store in ``away``, or beside the workspace."""
    tree = killed_child.first_tree()
    after = tree
    for step in call.steps if call.kept else ():
        after = killed_child.apply(after, step, 1)
    orders = Orders(base, calls=[call], death_at_work=True)
    steady = call.engine != "external"  # how many steps a scan takes depends on the clock
    # A program takes its time: of its scenarios, each takes other instants.
    stride = max(STRIDE, 3 if call.engine in ("command", "external") else 1)
    first = (len(call.steps) + call.kept) % stride
    committed = False

    def begun() -> Workspace:
        store = None if away is None else fresh(away / "killed") / "store"
        return Workspace(fresh(base / "killed"), [tree, after], store)

    for death in itertools.islice(deaths(begun(), orders), first, None, stride):
        space = begun()
        if space.work(replace(orders, death=death)) is not None:
            assert not steady, f"{death} was not reached"
            continue
        kill_recoveries(space, death)
        committed |= space.recover() == 1 and call.kept and steady
        assert not committed or space.done == 1, f"kept at an earlier step, gone at {death}"


@pytest.mark.heavy
def test_a_kill_while_going_back_in_history_leaves_all_or_nothing(tmp_path: Path):
    first = (Step("write", "links/one", data=b"all three of them"),)
    second = (
        Step("write", "src/app.py", data=b"one"),
        Step("move", "src", "lib"),
        Step("write", "lib/app.py", data=b"two"),
        Step("append", "three", data=b", and more"),
        Step("delete", "node_modules"),
        Step("write", "node_modules", data=b"a file now"),
    )
    trees = [killed_child.first_tree()]
    for version, steps in enumerate((first, second), 1):
        tree = trees[-1]
        for step in steps:
            tree = killed_child.apply(tree, step, version)
        trees.append(tree)
    trees.append(trees[1])
    before = [Call("api", first, True), Call("api", second, True)]
    orders = Orders(tmp_path, calls=[*before, Call("revert", (), True)], death_at_work=True)

    def reached(name: str) -> Workspace:
        space = Workspace(fresh(tmp_path / name), trees)
        assert space.work(replace(orders, calls=before)) is not None
        assert space.done == 2
        return space

    committed = False
    for death in deaths(reached("0"), orders):
        space = reached("killed")
        assert space.work(replace(orders, death=death)) is None, f"{death} was not reached"
        kill_recoveries(space, death)
        committed |= space.recover() == 3
        assert not committed or space.done == 3, f"back at an earlier step, gone at {death}"


def deaths(space: Workspace, orders: Orders) -> Iterator[Death]:
    """Every step of a call that is left alone, and every write of it cut in half."""
    names = space.work(orders)
    assert names
    for number, name in enumerate(names, 1):
        yield Death(number)
        if name in killed_child.TEARABLE:
            yield Death(number, torn=True)


def kill_recoveries(space: Workspace, death: Death) -> None:
    """Kill the recovery at another of its steps for each death, and then once more."""
    for steps in (7, 13):
        if space.reopen(Death(1 + death.at % steps, torn=death.torn)):
            return


def fresh(base: Path) -> Path:
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir()
    return base
