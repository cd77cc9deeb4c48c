"""Random work on files, checked after each step against a model that is a plain dict.

The directory is looked at with ``os`` alone, and so is what lies beside it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from model import OWNER, ROOT, Entry, Model, Stat
from trees import Seen, look, make_repository, plant

from weakincentives.core.clock import FakeClock
from weakincentives.errors import FilesystemError, MergeConflict
from weakincentives.filesystem import HostFilesystem, MemoryFilesystem

# What can be done

PLAIN_PATHS = (
    *("a", "b", "c", "d", "d/a", "d/twin", "twin", "e", "e/shared", "noted", "d/run.sh"),
    *("d/empty", "hollow", "hollow/er", "hollow/er/deep/x", "new", "new/x", "new/y/z"),
    *("locked", "locked/file", ".env", "node_modules", "node_modules/pkg/index.js"),
    *("caf\u00e9", "cafe\u0301", "\U0001f389 party", "\U0001f389 party/new\nline"),
    *("repo", "repo/tracked.py", "repo/.git/index", "repo/.git/HEAD", "a/x", "odd"),
)
LINKED_PATHS = (
    *("to_a", "to_d", "to_d/a", "to_d/twin", "to_d/up/shared", "to_d/new/x", "d/up", "d/far"),
    *("absolute/a", "absolute", "dangling", "coming", "loop", "loop/x", "self", "pipe", "pipe/x"),
    *("out", "out/secret", "out/new", "out_file", "d/out_late", "out_absolute/secret"),
)


class Big(bytes):
    """Megabytes that print as a few letters."""

    def __repr__(self) -> str:
        return "BIG"


BIG = Big(bytes(range(256)) * 12_000)
CONTENTS = st.sampled_from(
    [b"", b"x", b"y\n", b"\0\xff", b"four", *[b"text %d\n" % n for n in range(8)], BIG]
)


def operations(paths: Sequence[str], existing: list[str]) -> st.SearchStrategy[tuple[Any, ...]]:
    """Return what may be done, in proportions that make the most of a short run."""
    path = st.sampled_from(paths)
    there = path | st.sampled_from(existing)
    changing = st.one_of(
        st.tuples(st.just("write_bytes"), there, CONTENTS),
        st.tuples(st.just("append"), there, st.sampled_from(["", "more", "é\n"])),
        st.tuples(st.just("mkdir"), path),
        st.tuples(st.just("delete"), there, st.booleans()),
        st.tuples(st.just("move"), there, path, st.booleans()),
        st.tuples(st.just("copy"), there, path, st.booleans()),
        st.tuples(st.just("set_readonly"), there, st.booleans()),
    )
    reading = st.tuples(
        st.sampled_from(["read_bytes", "exists", "is_readonly", "stat", "list", "glob"]), there
    )
    at_the_root = st.one_of(
        st.tuples(st.sampled_from(["list", "glob", "exists", "mkdir", "stat"]), st.just(".")),
        st.tuples(st.just("delete"), st.just("."), st.booleans()),
        st.tuples(st.sampled_from(["move", "copy"]), st.just("."), path, st.booleans()),
        st.tuples(st.sampled_from(["move", "copy"]), path, st.just("."), st.booleans()),
    )
    return st.sampled_from([changing] * 7 + [reading] * 3 + [at_the_root]).flatmap(lambda it: it)


def outcome(target: Any, operation: tuple[Any, ...]) -> object:
    """Return what an operation gives, or the kind of refusal."""
    name, *args = operation
    try:
        return APPLY[name](target, *args)
    except FilesystemError as refusal:
        return type(refusal)


def stat_of(entry: Any) -> Stat:
    return Stat(entry.path, entry.kind, entry.size, entry.readonly)


APPLY: dict[str, Any] = {
    "read_bytes": lambda fs, path: fs.read_bytes(path),
    "exists": lambda fs, path: fs.exists(path),
    "is_readonly": lambda fs, path: fs.is_readonly(path),
    "stat": lambda fs, path: stat_of(fs.stat(path)),
    "list": lambda fs, path: [stat_of(entry) for entry in fs.list(path)],
    "glob": lambda fs, path: list(fs.glob("**/*", path)),
    "write_bytes": lambda fs, path, content: fs.write_bytes(path, content),
    "append": lambda fs, path, content: fs.append(path, content),
    "mkdir": lambda fs, path: fs.mkdir(path),
    "set_readonly": lambda fs, path, readonly: fs.set_readonly(path, readonly),
    "delete": lambda fs, path, recursive: fs.delete(path, recursive=recursive),
    "move": lambda fs, a, b, overwrite: fs.move(a, b, overwrite=overwrite),
    "copy": lambda fs, a, b, overwrite: fs.copy(a, b, overwrite=overwrite),
}
APPLY_TO_MODEL: dict[str, Any] = {
    **APPLY,
    "stat": lambda model, path: model.stat(path),
    "list": lambda model, path: model.list(path),
    "glob": lambda model, path: model.glob(path),
    "delete": lambda model, path, recursive: model.delete(path, recursive),
    "move": lambda model, a, b, overwrite: model.move(a, b, overwrite),
    "copy": lambda model, a, b, overwrite: model.copy(a, b, overwrite),
}


def expected_outcome(model: Model, operation: tuple[Any, ...]) -> object:
    name, *args = operation
    before = model.copy_of_entries()
    try:
        return APPLY_TO_MODEL[name](model, *args)
    except FilesystemError as refusal:
        assert model.entries == before, "the model changed something and then refused"
        return type(refusal)


# Where it is done


class InMemory:
    """A filesystem in memory. What it holds can only be seen through itself."""

    def __init__(self) -> None:
        self.clock = FakeClock(1000.0)
        self.fs = MemoryFilesystem(
            {"a": "a\n", "b": "", "d/a": "in d\n", "locked/file": "x", ".env": "TOKEN=secret\n"},
            readonly=["locked/file"],
            clock=self.clock,
        )
        self.fs.mkdir("hollow/er")
        self.real_root = "/nowhere"

    def begin(self, target: Any) -> Any:
        return target.fork()

    def keep(self, target: Any, view: Any) -> None:
        target.merge(view)

    def undo(self, target: Any, view: Any) -> None:
        """A view that nobody merges has done nothing."""

    def look(self, target: Any) -> dict[str, Seen]:
        # A fork: looking at a view itself makes it depend on what is seen.
        fs = target.fork()
        found, pending = {ROOT: self._seen(fs.stat("."), fs)}, ["."]
        while pending:
            for entry in fs.list(pending.pop()):
                found[f"{ROOT}/{entry.path}"] = self._seen(entry, fs)
                if entry.kind == "directory":
                    pending.append(entry.path)
        self.clock.advance(1)
        return found

    def _seen(self, entry: Any, fs: Any) -> Seen:
        file = entry.kind == "file"
        return Seen(
            kind=entry.kind,
            mode=0o755 if not file else 0o444 if entry.readonly else 0o644,
            content=fs.read_bytes(entry.path) if file else None,
            links=0,
            names=frozenset([ROOT if entry.path == "." else f"{ROOT}/{entry.path}"]),
            xattrs=(),
            owner=OWNER,
            modified=int(entry.modified * 1e9),
        )

    def close(self) -> None:
        """Nothing is held."""


class OnDisk:
    """A real directory, with some of everything in it."""

    def __init__(self, repository: Path) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="wink-model-")
        self.above = Path(self._temporary.name).resolve() / "some" / "way" / "down"
        plant(self.above, repository)
        self.real_root = os.fspath(self.above / ROOT)
        self.fs = HostFilesystem(self.real_root, unprotected=["*"])

    def holds(self, path: Path) -> bool:
        """Tell whether a path, with symlinks followed, is in the directory of this test."""
        return Path(os.path.realpath(path)).is_relative_to(self.above)

    def begin(self, target: Any) -> Any:
        if target is self.fs:
            assert self.fs.gate.acquire(timeout=120)
        return target.fork_in_place()

    def keep(self, target: Any, view: Any) -> None:
        target.merge(view)
        self._end(target)

    def undo(self, target: Any, view: Any) -> None:
        assert target.discard(view) == ()
        self._end(target)

    def _end(self, target: Any) -> None:
        if target is self.fs:
            self.fs.gate.release()

    def look(self, target: Any) -> dict[str, Seen]:
        """Look at the directory and beside it, not at the store, and not through the library.

        The store may have names for files, so how many there are in all is left out.
        """
        found = look(self.above)
        ours = {path for path in found if path.split("/")[0] in (ROOT, "outside")}
        return {
            path: found[path]._replace(links=0, names=found[path].names & ours) for path in ours
        }

    def reopen(self) -> None:
        self.fs.close()
        self.fs = HostFilesystem(self.real_root, unprotected=["*"])
        assert not self.fs.recovered

    def close(self) -> None:
        self.fs.close()
        self._temporary.cleanup()


# The machine


@dataclass(eq=False)
class Level:
    """A call under way that works in place; calls nest."""

    view: Any
    before: dict[str, Entry]
    tokens: list[tuple[Any, dict[str, Entry]]] = field(default_factory=list)
    written: list[str] = field(default_factory=list)


@dataclass(eq=False)
class Private:
    """A private view, what it should see, and what was done through it."""

    view: Any
    parent: Private | None
    model: Model
    changes_at_fork: int
    changes: int = 0
    program: list[tuple[tuple[Any, ...], object]] = field(default_factory=list)
    tokens: list[tuple[Any, dict[str, Entry]]] = field(default_factory=list)


class Files(RuleBasedStateMachine):
    """Calls in place, savepoints, private views and direct use, in any order that is allowed."""

    paths: tuple[str, ...] = PLAIN_PATHS

    def __init__(self) -> None:
        super().__init__()
        self.place: Any = self.make_place()
        self.changes = 0
        self.levels: list[Level] = []
        self.privates: list[Private] = []
        self.tokens: list[tuple[Any, dict[str, Entry]]] = []
        self.model = Model.of(self.place.look(self.place.fs), self.place.real_root)

    def make_place(self) -> Any:
        return InMemory()

    def teardown(self) -> None:
        self.privates.clear()
        while self.levels:
            self.undo()
        self.check()
        self.place.close()

    @property
    def top(self) -> Any:
        return self.levels[-1].view if self.levels else self.place.fs

    @property
    def below_top(self) -> Any:
        return self.levels[-2].view if len(self.levels) > 1 else self.place.fs

    def operations(self, model: Model) -> st.SearchStrategy[tuple[Any, ...]]:
        return operations(self.paths, model.some_paths())

    # Direct use, and calls in place

    @rule(data=st.data(), count=st.integers(1, 4))
    def operate(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            operation = data.draw(self.operations(self.model), label="operation")
            before = self.model.copy_of_entries()
            found = outcome(self.top, operation)
            assert found == expected_outcome(self.model, operation), operation
            self.changes += self.model.entries != before
            if self.levels and operation[0] in ("write_bytes", "append") and found is None:
                self.levels[-1].written.append(self.model.resolve(operation[1]))
            self.check()

    @precondition(lambda self: not self.privates and len(self.levels) < 4)
    @rule()
    def begin(self) -> None:
        self.levels.append(Level(self.place.begin(self.top), self.model.copy_of_entries()))

    @precondition(lambda self: self.levels and not self.privates)
    @rule()
    def keep(self) -> None:
        self.place.keep(self.below_top, self.levels[-1].view)
        kept = self.levels.pop()
        if self.levels:
            self.levels[-1].written += kept.written
        self.check()

    @precondition(lambda self: self.levels and not self.privates)
    @rule()
    def undo(self) -> None:
        self.place.undo(self.below_top, self.levels[-1].view)
        self.model.entries = self.levels.pop().before
        self.check()

    @rule()
    def snapshot(self) -> None:
        tokens = self.levels[-1].tokens if self.levels else self.tokens
        tokens.append((self.top.snapshot(), self.model.copy_of_entries()))
        if self.levels:
            # Only what is written after it is sure to be undone by going back to it.
            self.levels[-1].written.clear()

    @precondition(lambda self: self.can_restore())
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        tokens = self.levels[-1].tokens if self.levels else self.tokens
        number = data.draw(st.integers(0, len(tokens) - 1), label="which snapshot")
        token, entries = tokens[number]
        self.top.restore(token)
        # What came after it cannot be gone back to: not on every filesystem.
        del tokens[number + 1 :]
        self.model.entries = dict(entries)
        self.changes += 1
        if self.levels:
            self.levels[-1].written.clear()
        self.check()

    def can_restore(self) -> bool:
        """A call in place does not go back while views of it are open."""
        if self.levels:
            return bool(self.levels[-1].tokens) and not self.privates
        return bool(self.tokens)

    # Private views

    @precondition(lambda self: len(self.privates) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = pick(data, [None, *self.privates], "of")
        view = (parent.view if parent else self.top).fork()
        model = parent.model if parent else self.model
        self.privates.append(
            Private(
                view=view,
                parent=parent,
                model=Model(model.copy_of_entries(), model.real_root),
                changes_at_fork=(parent or self).changes,
            )
        )

    @precondition(lambda self: self.privates)
    @rule(data=st.data(), count=st.integers(1, 4))
    def operate_privately(self, data: st.DataObject, count: int) -> None:
        private = pick(data, self.privates, "view")
        for _ in range(count):
            operation = data.draw(self.operations(private.model), label="operation")
            self.run_privately(private, operation)
        self.check()

    def run_privately(self, private: Private, operation: tuple[Any, ...]) -> None:
        before = private.model.copy_of_entries()
        found = outcome(private.view, operation)
        assert found == expected_outcome(private.model, operation), operation
        private.changes += private.model.entries != before
        private.program.append((operation, found))

    def is_fresh(self, private: Private | None) -> bool:
        """Tell whether nothing has changed under a view since it was forked."""
        if private is None:
            return True
        same = (private.parent or self).changes == private.changes_at_fork
        return same and self.is_fresh(private.parent)

    @precondition(lambda self: self.privates)
    @rule(data=st.data())
    def snapshot_privately(self, data: st.DataObject) -> None:
        private = pick(data, self.privates, "view")
        token = private.view.snapshot()
        private.tokens.append((token, private.model.copy_of_entries()))
        private.program.append((("snapshot", token), None))

    @precondition(lambda self: any(private.tokens for private in self.privates))
    @rule(data=st.data())
    def restore_privately(self, data: st.DataObject) -> None:
        having = [private for private in self.privates if private.tokens]
        private = pick(data, having, "view")
        number = data.draw(st.integers(0, len(private.tokens) - 1), label="which snapshot")
        token, entries = private.tokens[number]
        private.view.restore(token)
        del private.tokens[number + 1 :]
        private.model.entries = dict(entries)
        private.changes += 1
        private.program.append((("restore", token), None))

    @precondition(lambda self: self.privates)
    @rule(data=st.data())
    def merge(self, data: st.DataObject) -> None:
        private = pick(data, self.privates, "view")
        self.forget(private)
        parent, fresh = private.parent, self.is_fresh(private)
        try:
            (parent.view if parent else self.top).merge(private.view)
        except MergeConflict as conflict:
            refused = conflict
        else:
            refused = None
        if refused is not None:
            assert not fresh, refused
            assert refused.paths
            self.check()
            return
        if parent is not None:
            parent.program += private.program
        model = parent.model if parent else self.model
        before = model.copy_of_entries()
        replay(private.program, model)
        (parent or self).changes += model.entries != before
        self.check()

    @precondition(lambda self: self.privates)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.forget(pick(data, self.privates, "view"))
        self.check()

    def forget(self, private: Private) -> None:
        """Let go of a view, and of the views of it."""
        self.privates.remove(private)
        for other in [other for other in self.privates if other.parent is private]:
            self.forget(other)

    @invariant()
    def views_see_what_they_should(self) -> None:
        """Looked at through a fork: looking at a view itself makes it depend on what is seen."""
        for private in self.privates:
            assert overview(private.view.fork()) == overview(private.model)

    def check(self) -> None:
        self.model.check(self.place.look(self.top))


def pick(data: st.DataObject, among: Sequence[Any], label: str) -> Any:
    """Draw by number: what is drawn is printed, and a view is a lot to print."""
    return among[data.draw(st.integers(0, len(among) - 1), label=label)]


def overview(target: Any) -> dict[str, tuple[Stat, bytes | None]]:
    """Return all that can be reached through a filesystem, or should be."""
    found: dict[str, tuple[Stat, bytes | None]] = {}
    pending = ["."]
    while pending:
        for entry in target.list(pending.pop()):
            it = Stat(entry.path, entry.kind, entry.size, entry.readonly)
            found[it.path] = it, target.read_bytes(it.path) if it.kind == "file" else None
            if it.kind == "directory" and it.path.count("/") < 4:
                pending.append(it.path)
    return found


def replay(program: list[tuple[tuple[Any, ...], object]], model: Model) -> None:
    """Do to a model what a view did; it must give what the view was given."""
    taken: dict[int, dict[str, Entry]] = {}
    for operation, result in program:
        match operation:
            case ("snapshot", token):
                taken[id(token)] = model.copy_of_entries()
            case ("restore", token):
                model.entries = dict(taken[id(token)])
            case _:
                assert expected_outcome(model, operation) == result, operation


class FilesOnDisk(Files):
    """The same on a real directory, which others can change too, and which can be opened again."""

    paths = (*PLAIN_PATHS, *LINKED_PATHS)

    def make_place(self) -> Any:
        return OnDisk(self.repository)

    repository: Path

    @property
    def idle(self) -> bool:
        return not self.levels and not self.privates

    @precondition(lambda self: self.idle)
    @rule()
    def reopen(self) -> None:
        self.place.reopen()
        self.tokens.clear()
        self.check()

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def somebody_else_changes_anything(self, data: st.DataObject) -> None:
        """Between calls the directory is anybody's."""
        path = data.draw(st.sampled_from(self.model.some_paths()), label="path")
        change = data.draw(st.sampled_from(CHANGES_BY_OTHERS), label="change")
        # A symlink may have been moved to where it leads anywhere: never follow it out.
        if self.place.holds(self.place.above / ROOT / path):
            with contextlib.suppress(OSError):
                change(self.place.above / ROOT, path)
        self.model = Model.of(self.place.look(self.place.fs), self.place.real_root)
        self.tokens.clear()

    @precondition(lambda self: not self.privates)
    @rule(data=st.data(), content=CONTENTS)
    def bystander_works_meanwhile(self, data: st.DataObject, content: bytes) -> None:
        """What a call has not touched stays as others leave it, whatever becomes of the call."""
        (self.place.above / ROOT / "bystander" / "file").write_bytes(content)
        entry = Model.of(self.place.look(self.top), "").entries[BYSTANDER]
        states = [self.model.entries, *(level.before for level in self.levels)]
        tokens = [*self.tokens, *(token for level in self.levels for token in level.tokens)]
        for entries in [*states, *(entries for _, entries in tokens)]:
            entries[BYSTANDER] = replace(entry, number=entries[BYSTANDER].number)

    @precondition(lambda self: self.levels and not self.privates and self.written_here())
    @rule(data=st.data())
    def formatter_runs_over_what_the_call_wrote(self, data: st.DataObject) -> None:
        """What happens to a path after the call's first write to it is the call's."""
        place = data.draw(st.sampled_from(self.written_here()), label="path")
        change = data.draw(st.sampled_from([rewrite, rewrite_by_rename, make_private]))
        change(self.place.above, place)
        self.model.adopt(place, self.place.look(self.top))
        self.check()

    def written_here(self) -> list[str]:
        return [
            place
            for place in self.levels[-1].written
            if place in self.model.entries and self.model.entries[place].kind == "file"
        ]


BYSTANDER = f"{ROOT}/bystander/file"


def rewrite(root: Path, path: str) -> None:
    # Not with open(): a pipe that nobody reads from would keep it waiting.
    descriptor = os.open(root / path, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "wb") as file:
        file.write(b"rewritten in place")


def rewrite_by_rename(root: Path, path: str) -> None:
    aside = root / ".aside"
    aside.write_bytes(b"rewritten by rename")
    aside.rename(root / path)


def change_mode(path: Path, mode: int) -> None:
    # Whom permissions hold for could not work in such a directory, nor look into it.
    if os.geteuid() == 0 or not path.is_dir():
        path.chmod(mode)


def make_private(root: Path, path: str) -> None:
    change_mode(root / path, 0o600)


def make_hard_link(root: Path, path: str) -> None:
    os.link(root / path, root / "c", follow_symlinks=False)


def make_symlink(root: Path, path: str) -> None:
    (root / "new").symlink_to(path)


def make_unwritable(root: Path, path: str) -> None:
    change_mode(root / path, 0o555)


def make_writable(root: Path, path: str) -> None:
    (root / path).chmod(0o755)


def make_old(root: Path, path: str) -> None:
    os.utime(root / path, ns=(10**18 + 7, 10**18 + 7), follow_symlinks=False)


def make_note(root: Path, path: str) -> None:
    os.setxattr(root / path, "user.note", b"by another")


def remove(root: Path, path: str) -> None:
    if (root / path).is_dir() and not (root / path).is_symlink():
        shutil.rmtree(root / path)
    else:
        (root / path).unlink()


def plant_file(root: Path, path: str) -> None:
    (root / path / "planted").write_bytes(b"planted")


CHANGES_BY_OTHERS = [
    *(rewrite, rewrite_by_rename, make_private, make_hard_link, make_symlink, make_unwritable),
    *(make_writable, make_old, make_note, remove, plant_file),
]

EXAMPLES = settings.default.max_examples


class TestInMemory(Files.TestCase):
    settings = settings(max_examples=max(30, EXAMPLES // 5), stateful_step_count=30)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    repository = tmp_path_factory.mktemp("template") / "repo"
    make_repository(repository)
    FilesOnDisk.repository = repository


@pytest.mark.usefixtures("repository")
class TestOnDisk(FilesOnDisk.TestCase):
    settings = settings(max_examples=max(15, EXAMPLES // 10), stateful_step_count=25)


def test_view_sees_its_change_through_another_name_of_the_file(tmp_path):
    """What a view did is what running it alone would have done."""
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / "one").write_text("old")
    os.link(tmp_path / "workspace" / "one", tmp_path / "workspace" / "two")
    with HostFilesystem(tmp_path / "workspace") as fs:
        view = fs.fork()
        view.write("one", "new")

        assert view.read("two") == "new"
