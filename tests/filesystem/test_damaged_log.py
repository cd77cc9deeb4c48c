"""A damaged log is harmless or told in words: it never hides a change, and never costs a file."""

from __future__ import annotations

import contextlib
import logging
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from trees import look, put

from chance import HEAVY, SEED
from weakincentives.errors import (
    FilesystemError,
    HistoryDamaged,
    LogDamaged,
    UndoRefused,
    WinkError,
)
from weakincentives.filesystem import HostFilesystem, WorkspaceHistory

State = dict[str, tuple[object, ...]]
PAGE = 4096
FLIPS = 400 if HEAVY else 40


def contents(root: Path) -> State:
    return {path: (each.kind, each.mode, each.content) for path, each in look(root).items()}


class Damaged:
    """A workspace with some calls, to be damaged again and again."""

    def __init__(self, place: Path) -> None:
        self.place, self.root, self.store = place, place / "work", place / "store"
        for path in ("a", "d/b", "d/c", "e"):
            put(self.root / path, f"{path} at first\n" * 50)
        self.states = [contents(self.root)]
        with self.open() as fs:
            for change in (
                lambda: fs.write("a", "one\n" * 100),
                lambda: fs.delete("d", recursive=True),
                lambda: fs.write("q/r/s", "new\n"),
                lambda: fs.move("q", "z"),
                lambda: fs.move("e", "f"),
                lambda: fs.write("a", "two\n" * 3000),
                lambda: fs.undo(fs.history()[-1]),
                *(lambda n=n: fs.write("a", f"{n}\n" * 400) for n in range(4)),
            ):
                change()
                self.states.append(contents(self.root))
            self._keep("store with its log still open", self.store)
        self._keep("store", self.store)
        self._keep("root", self.root)

    def open(self) -> HostFilesystem:
        return HostFilesystem(self.root, store=self.store)

    def _keep(self, name: str, path: Path) -> None:
        shutil.copytree(path, self.place / f"kept {name}", symlinks=True)

    def bring_back(self, store: str = "store") -> None:
        """Make everything as it was before the damage; the directory itself stays the same."""
        for path, kept in ((self.store, store), (self.root, "root")):
            for each in path.iterdir():
                shutil.rmtree(each) if each.is_dir() else each.unlink()
            shutil.copytree(self.place / f"kept {kept}", path, symlinks=True, dirs_exist_ok=True)

    def check(self, log: pytest.LogCaptureFixture) -> str:
        """Use the workspace; returns what is wrong, or ``told`` or ``harmless``."""
        log.clear()
        told = self._read()
        with self.open() as fs:
            told += fs.recovered
            if contents(self.root) != self.states[-1]:
                return "opening it changed files"
            try:
                calls = fs.history()
            except LogDamaged as error:
                told.append(str(error))
                calls = ()
            if len(calls) != len(self.states) - 1 and not (told or log.messages):
                return f"hidden: {len(self.states) - 1 - len(calls)} calls"
            for call in reversed(calls):
                try:
                    told += fs.undo(call)
                except (FilesystemError, HistoryDamaged, LogDamaged, UndoRefused, OSError) as error:
                    told.append(str(error))
                told += log.messages
                if not told and contents(self.root) != self.states[call.serial - 1]:
                    return f"call {call.serial} was undone to something else"
        with self.open() as fs:
            before = contents(self.root)
            try:
                fs.write("new", "goes on\n")
            except LogDamaged as error:  # rolled back, and set aside
                told.append(str(error))
                if contents(self.root) != before:
                    return "a failed call changed files"
                fs.write("new", "goes on\n")
            fs.undo(fs.history()[-1])
            if contents(self.root) != before:
                return "it does not go on"
        return "told" if told or log.messages else "harmless"

    def _read(self) -> list[str]:
        """Ask without opening the workspace, as `wink log` does."""
        try:
            history = WorkspaceHistory(self.root, store=self.store)
            history.calls()
            return [*history.damaged()]
        except (LogDamaged, HistoryDamaged) as error:
            return [str(error)]


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Damaged:
    return Damaged(tmp_path_factory.mktemp("damaged"))


def try_all(
    damaged: Damaged, log: pytest.LogCaptureFixture, cases: dict[str, Callable[[Path], None]]
) -> dict[str, int]:
    """Damage the store in each of some ways; returns how often it was harmless, and told."""
    found: dict[str, str] = {}
    with log.at_level(logging.WARNING):
        for name, damage in cases.items():
            damaged.bring_back()
            damage(damaged.store)
            try:
                found[name] = damaged.check(log)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    wrong = {name: what for name, what in found.items() if what not in ("told", "harmless")}
    assert wrong == {}
    outcomes = list(found.values())
    return {what: outcomes.count(what) for what in ("harmless", "told")}


def flip(bit: int) -> Callable[[Path], None]:
    def damage(store: Path) -> None:
        data = bytearray((store / "log.db").read_bytes())
        data[bit // 8] ^= 1 << bit % 8
        (store / "log.db").write_bytes(data)

    return damage


def pages_of(store: Path, table: str) -> list[int]:
    """Return the numbers of the pages of a table or index, from 0."""
    with contextlib.closing(sqlite3.connect(store / "log.db")) as database:
        root = database.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)
        ).fetchone()[0]
    return [root - 1]


def test_a_flipped_bit_is_harmless_or_told(
    damaged: Damaged, caplog: pytest.LogCaptureFixture
) -> None:
    damaged.bring_back()
    bits = (damaged.store / "log.db").stat().st_size * 8
    dice = random.Random(SEED)
    chosen = [dice.randrange(bits) for _ in range(FLIPS)]
    counted = try_all(damaged, caplog, {f"bit {bit}": flip(bit) for bit in chosen})
    assert min(counted.values()) > 0


@pytest.mark.parametrize(
    "table", ["operation", "change", "head", "need", "sqlite_autoindex_operation_1"]
)
def test_a_flipped_bit_where_operations_are_found_is_harmless_or_told(
    damaged: Damaged, caplog: pytest.LogCaptureFixture, table: str
) -> None:
    damaged.bring_back()
    (page,) = pages_of(damaged.store, table)
    dice = random.Random(f"{SEED} {table}")
    chosen = {(page * PAGE) * 8 + dice.randrange(PAGE * 8) for _ in range(FLIPS // 4)}
    # The header of the page, and the places of its rows, are a small part of it.
    chosen |= {(page * PAGE) * 8 + dice.randrange(40 * 8) for _ in range(FLIPS // 8)}
    try_all(damaged, caplog, {f"bit {bit}": flip(bit) for bit in sorted(chosen)})


def test_a_flipped_bit_in_the_schema_is_harmless_or_told(
    damaged: Damaged, caplog: pytest.LogCaptureFixture
) -> None:
    dice = random.Random(f"{SEED} schema")
    chosen = [dice.randrange(PAGE * 8) for _ in range(FLIPS // 4)]
    try_all(damaged, caplog, {f"bit {bit}": flip(bit) for bit in chosen})


def test_a_lost_page_is_harmless_or_told(
    damaged: Damaged, caplog: pytest.LogCaptureFixture
) -> None:
    def zeroed(page: int) -> Callable[[Path], None]:
        def damage(store: Path) -> None:
            with open(store / "log.db", "r+b") as file:
                file.seek(page * PAGE)
                file.write(bytes(PAGE))

        return damage

    damaged.bring_back()
    pages = range((damaged.store / "log.db").stat().st_size // PAGE)
    try_all(damaged, caplog, {f"page {page}": zeroed(page) for page in pages})


def test_a_shortened_database_is_told(damaged: Damaged, caplog: pytest.LogCaptureFixture) -> None:
    def cut(size: int) -> Callable[[Path], None]:
        def damage(store: Path) -> None:
            with open(store / "log.db", "r+b") as file:
                file.truncate(size)

        return damage

    damaged.bring_back()
    full = (damaged.store / "log.db").stat().st_size
    sizes = [1, 50, 100, *range(PAGE, full, PAGE), full - 100]
    counted = try_all(damaged, caplog, {f"{size} bytes": cut(size) for size in sizes})
    assert counted["harmless"] == 0


@pytest.mark.parametrize("number", range(1, 12))
def test_a_missing_operation_is_told(
    damaged: Damaged, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """As a flipped bit in a page of rows can do, without an error."""

    def remove(store: Path) -> None:
        with contextlib.closing(sqlite3.connect(store / "log.db")) as database, database:
            database.execute("DELETE FROM operation WHERE number = ?", (number,))

    assert try_all(damaged, caplog, {"row": remove})["told"] == 1


@pytest.mark.parametrize("table", ["head", "change", "need", "content", "operation"])
def test_an_emptied_table_is_harmless_or_told(
    damaged: Damaged, caplog: pytest.LogCaptureFixture, table: str
) -> None:
    def empty(store: Path) -> None:
        with contextlib.closing(sqlite3.connect(store / "log.db")) as database, database:
            database.execute(f"DELETE FROM {table}")

    try_all(damaged, caplog, {table: empty})


def test_a_flipped_bit_in_what_a_kill_left_is_harmless_or_told(
    damaged: Damaged, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest calls are in the write-ahead log; SQLite reads that up to its first error."""
    size = (damaged.place / "kept store with its log still open" / "log.db-wal").stat().st_size
    dice = random.Random(f"{SEED} wal")
    failures: dict[int, str] = {}
    with caplog.at_level(logging.WARNING):
        for bit in (dice.randrange(size * 8) for _ in range(FLIPS // 4)):
            damaged.bring_back("store with its log still open")
            data = bytearray((damaged.store / "log.db-wal").read_bytes())
            data[bit // 8] ^= 1 << bit % 8
            (damaged.store / "log.db-wal").write_bytes(data)
            (damaged.store / "log.db-shm").unlink(missing_ok=True)
            try:
                told = damaged.check(caplog)
            except Exception as error:
                told = f"{type(error).__name__}: {error}"
            if told not in ("told", "harmless"):
                failures[bit] = told
    assert failures == {}


def test_a_missing_content_is_told_and_leaves_the_file(
    damaged: Damaged, caplog: pytest.LogCaptureFixture
) -> None:
    def remove(name: str) -> Callable[[Path], None]:
        return lambda store: shutil.rmtree(store / name)

    try_all(damaged, caplog, {name: remove(name) for name in ("objects", "kept")})


@pytest.mark.parametrize("planted", ["a link", "a directory", "a link elsewhere"])
def test_something_else_in_place_of_the_database_is_never_written_to(
    damaged: Damaged, caplog: pytest.LogCaptureFixture, tmp_path: Path, planted: str
) -> None:
    damaged.bring_back()
    other = tmp_path / "other.db"
    with contextlib.closing(sqlite3.connect(other)) as database, database:
        database.execute("CREATE TABLE mine (x)")
        database.execute("INSERT INTO mine VALUES ('precious')")
    before = other.read_bytes()
    (damaged.store / "log.db").unlink()
    if planted == "a directory":
        (damaged.store / "log.db").mkdir()
    elif planted == "a link":
        (damaged.store / "log.db").symlink_to(other)
    else:
        (damaged.store / "log.db").symlink_to(tmp_path / "not there")
    with contextlib.suppress(WinkError), damaged.open() as fs:
        fs.write("new", "x\n")
    assert other.read_bytes() == before
    assert not (tmp_path / "not there").exists()
    seen = contents(damaged.root)
    seen.pop("new", None)
    assert {path: each for path, each in seen.items() if path} == {
        path: each for path, each in damaged.states[-1].items() if path
    }
