"""The log in SQLite: whole operations or none, read back exactly, damage noticed."""

from __future__ import annotations

import hashlib
import multiprocessing
import random
import signal
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import log_child
import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_child import STOPPED, operation

from chance import THOROUGH
from injection import injections, needs_strace, run
from weakincentives.errors import HistoryDamaged, LogUnavailable, StaleHead, StoreRefused
from weakincentives.log import (
    CallRecord,
    Change,
    Entry,
    Log,
    Operation,
    SessionDelta,
    SliceChange,
)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with closing(Log(tmp_path / "log.db")) as log:
        yield log


# Operations

text = st.text(max_size=8)
name = st.text(
    st.characters(blacklist_characters="/\0", blacklist_categories=("Cs",))
    | st.sampled_from(["\\", "\udcff", "\udc80", "u"]),
    min_size=1,
    max_size=6,
)
path = st.lists(name, max_size=4).map(tuple)
entry = st.none() | st.builds(
    Entry,
    kind=st.sampled_from(["file", "directory", "link", "pipe", "other"]),
    mode=st.integers(0, 0o7777),
    uid=st.integers(0, 2**31),
    mtime_ns=st.integers(0, 2**62),
    size=st.integers(0, 2**62),
    content=name | text,
    xattrs=st.lists(st.tuples(text, st.binary(max_size=4)), max_size=2).map(tuple),
    group=st.integers(0, 3),
)
changes = st.dictionaries(path, st.tuples(entry, entry, st.none() | path), max_size=5).map(
    lambda found: tuple(sorted(Change(parts, *rest) for parts, rest in found.items()))
)
delta = st.builds(
    SessionDelta,
    state=st.lists(st.builds(SliceChange, text, st.none() | text, st.none() | text)).map(tuple),
    appended=st.lists(st.tuples(text, text)).map(tuple),
)
call = st.none() | st.builds(
    CallRecord,
    id=st.uuids().map(str),
    session=text,
    tool=text,
    arguments=text,
    answer=text,
    outcome=st.sampled_from(["committed", "failed"]),
    started=st.floats(0, 1e12),
    duration=st.floats(0, 1e6),
)
operations = st.builds(
    Operation,
    id=st.uuids().map(str),
    number=st.just(0),
    parent=st.just(0),
    kind=st.sampled_from(["call", "undo", "edit"]),
    merged=st.none() | st.integers(1, 9),
    call=call,
    changes=changes,
    session=delta,
    undoes=st.lists(st.integers(1, 99), max_size=3).map(tuple),
)


@given(made=st.lists(operations, max_size=3))
def test_operations_are_read_back_exactly(made: list[Operation]) -> None:
    with TemporaryDirectory() as place, closing(Log(Path(place, "log.db"))) as log:
        appended = [log.append(replace(each, parent=log.head())) for each in made]

        assert [each.number for each in appended] == list(range(1, len(made) + 1))
        assert list(log.line(log.head())) == appended[::-1]


def test_an_operation_can_be_found_by_its_id_and_its_contents_by_digest(log: Log) -> None:
    log.append(operation(1, 0), contents=[b"text"])

    assert log.has("operation-1")
    assert not log.has("operation-2")
    assert log.content(hashlib.sha256(b"text").hexdigest()) == b"text"
    with pytest.raises(LookupError):
        log.content(hashlib.sha256(b"other").hexdigest())


def test_branches_have_heads_of_their_own(log: Log) -> None:
    log.append(operation(1, 0))
    log.append(operation(2, 0), line="parser")

    assert (log.head(), log.head("parser"), log.head("unknown")) == (1, 2, 0)


def test_an_operation_on_a_replaced_head_is_refused(log: Log) -> None:
    log.append(operation(1, 0))

    with pytest.raises(StaleHead, match="operation 0 is not the head of the workspace: that is 1"):
        log.append(operation(2, 0))
    assert log.head() == 1
    assert not log.has("operation-2")


def test_a_call_is_on_record_once_in_its_session(log: Log) -> None:
    log.append(operation(1, 0))
    again = replace(operation(1, 1), id="another operation")

    with pytest.raises(LogUnavailable, match="UNIQUE"):
        log.append(again)
    assert log.head() == 1


def test_people_can_query_calls_and_files(log: Log) -> None:
    log.append(operation(1, 0))

    with closing(sqlite3.connect(log.path)) as reader:
        calls = reader.execute("SELECT number, tool, outcome, changes FROM calls").fetchall()
        files = reader.execute("SELECT path, kind_before, kind_after, size_after FROM file_changes")

        assert calls == [(1, "write", "committed", 3)]
        assert files.fetchall()[0] == ("a.txt", None, "file", 10)


# Several at once


def test_threads_append_one_after_the_other(log: Log) -> None:
    def append(numbers: range) -> None:
        for number in numbers:
            while True:
                try:
                    log.append(operation(number, log.head()))
                    break
                except StaleHead:
                    continue

    threads = [threading.Thread(target=append, args=(range(n, n + 20),)) for n in (100, 200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    line = list(log.line(log.head()))
    assert [each.number for each in line] == list(range(60, 0, -1))
    assert len({each.id for each in line}) == 60


def test_a_forked_child_is_told_to_open_its_own(log: Log) -> None:
    def use(answer: multiprocessing.SimpleQueue[str]) -> None:
        try:
            log.head()
        except RuntimeError as error:
            answer.put(str(error))

    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    child = context.Process(target=use, args=(answer,))
    child.start()
    child.join()

    assert answer.get() == f"{log.path} was opened before a fork. Open it in this process"


# What else can be there


def test_a_database_that_is_not_a_log_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE mine (x)")
    before = path.read_bytes()

    with pytest.raises(StoreRefused, match="not a log of this version"):
        Log(path)
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("mine",)]
    assert len(before) == path.stat().st_size


def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    path.write_bytes(b"a person's notes\n" * 100)

    with pytest.raises(LogUnavailable, match="not a database"):
        Log(path)
    assert path.read_bytes() == b"a person's notes\n" * 100


@pytest.mark.parametrize("seed", range(40))
def test_a_flipped_bit_is_noticed_or_harmless(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "log.db"
    with closing(Log(path)) as log:
        written = [log.append(operation(number, log.head())) for number in range(1, 9)]
    data = bytearray(path.read_bytes())
    chosen = random.Random(seed).randrange(len(data) * 8)
    data[chosen // 8] ^= 1 << chosen % 8
    path.write_bytes(data)

    try:
        with closing(Log(path)) as log:
            found = [log.read(number) for number in range(1, 9)]
    except (HistoryDamaged, LogUnavailable, StoreRefused, LookupError):
        return
    assert found == written


# Kills and failing disks

EVERY = 1 if THOROUGH else 4


@pytest.mark.heavy
def test_whatever_fails_below_python_an_operation_is_whole_or_absent(tmp_path: Path) -> None:
    """Kills, full disks and failing disks at each system call of SQLite."""
    needs_strace()
    count = 3

    def program(place: Path) -> list[str | Path]:
        return [log_child.__file__, place / "log.db", str(count)]

    faults = ("signal=KILL", "error=ENOSPC", "error=EIO")
    found = injections(program(tmp_path), *faults, code=count)
    assert {each.call for each in found} >= {"pwrite64"}
    for number, injection in enumerate(found[::EVERY]):
        place = tmp_path / str(number)
        place.mkdir()
        code = run(program(place), injection)
        done = code % STOPPED if code >= 0 else 0
        assert code >= 0 or code == -signal.SIGKILL, injection
        with closing(Log(place / "log.db")) as log:
            line = list(log.line(log.head()))
            assert [each.id for each in line] == [
                f"operation-{n}" for n in range(len(line), 0, -1)
            ], injection
            assert len(line) >= done, injection
            for each in line:
                assert each == replace(operation(each.number, each.parent), number=each.number)
