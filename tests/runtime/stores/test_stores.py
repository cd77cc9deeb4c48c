"""Sessions in files, SQLite and PostgreSQL: what is read back is what was saved, by one process."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_world import (
    ALL,
    KINDS,
    NAME,
    SQL,
    Child,
    CuttingProxy,
    Note,
    Place,
    Plan,
    Price,
    Seen,
    content,
    new_session,
    place_of,
)

from postgres import Postgres, started_postgres
from weakincentives.core.media import Media
from weakincentives.errors import (
    DatabaseUnavailable,
    LeaseLost,
    OutcomeOnRecord,
    SessionError,
    SessionInUse,
    SnapshotError,
    StoreRefused,
    WinkError,
)
from weakincentives.runtime import (
    Database,
    FileStore,
    OutcomeLedger,
    SavedSession,
    SavedSessionData,
    Session,
    SqlStore,
    compact_session,
    copy_session,
)
from weakincentives.runtime.ledger import CallOutcome
from weakincentives.runtime.stores.saves import Saves


@pytest.fixture(params=ALL)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with place_of(request) as found:
        yield found


@pytest.fixture(params=SQL)
def database(request: pytest.FixtureRequest) -> Iterator[Place]:
    with place_of(request) as found:
        yield found


class Lines:
    """Lines to attach."""

    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)

    def pending(self) -> list[str]:
        return self.lines

    def saved(self, count: int) -> None:
        del self.lines[:count]


def expire(place: Place) -> None:
    """Let the lease of a process end, as if it were gone for long."""
    place.sql("UPDATE wink_sessions SET expires = 1")


# Every store


def test_a_session_is_read_back_as_it_was(place: Place):
    session = new_session()
    session.dispatch(Note("before"))
    store = place.store()
    with SavedSession.create(NAME, session, about={"task": "fix ü \0"}, store=store) as saved:
        session.dispatch(Seen("after"))
        assert (saved.name.partition(".")[0], saved.mark[:3]) == ("20261118-0142-k3f", "k3f")
    assert store.names() == [NAME]

    with place.opened() as again:
        assert content(again.session) == content(session)
        assert again.about == {"task": "fix ü \0"}
        assert again.session.session_id == session.session_id
        assert again.session.tags == {"of": "a test"}
    read = SavedSessionData.read(place.store().log(NAME))
    assert read.state["store_world:Note"][0]["fields"] == {"text": "before"}


def test_there_is_one_session_of_a_name(place: Place):
    place.create().close()

    with pytest.raises(FileExistsError):
        place.create()
    with pytest.raises(FileNotFoundError):
        SavedSession.open("no-such-session", store=place.store())
    with pytest.raises(FileNotFoundError):
        place.store().log("no-such-session")
    with pytest.raises(FileNotFoundError):
        place.store().is_in_use("no-such-session")


def test_a_name_is_no_path(tmp_path: Path):
    for name in ("../a", "a/b", "", ".."):
        with pytest.raises(ValueError, match="not the name of a file"):
            FileStore(tmp_path).log(name)


def test_a_session_of_a_store_has_a_path_only_in_a_directory(place: Place):
    with place.create() as saved:
        if place.is_sql:
            with pytest.raises(SessionError, match="not in a file"):
                assert saved.path
        else:
            assert saved.path == Path(place.where) / NAME


def test_it_is_open_once_and_a_second_one_can_wait(place: Place):
    with place.create() as saved:
        assert place.store().is_in_use(NAME)
        with pytest.raises(SessionInUse, match="in use by another process"):
            SavedSession.open(NAME, store=place.store())
        with Child(place) as child:
            assert child.ask("open") == "SessionInUse"
            child.tell("open 600")  # waits
            saved.close()
            assert child.line() == ("2" if place.is_sql else "0")
            assert SavedSession.is_in_use(NAME, store=place.store())
            assert child.ask("note from the child") == "done"
            assert child.ask("close") == "done"
    assert not place.store().is_in_use(NAME)
    with place.opened() as again:
        assert again.session[Note].all() == (Note("from the child"),)


def test_deleting_leaves_nothing_and_spares_a_session_in_use(place: Place):
    with place.create() as saved:
        saved.session.dispatch(Seen(Media(b"GIF89a" * 1000)))
        assert not SavedSession.delete(NAME, store=place.store())
    assert SavedSession.delete(NAME, store=place.store())

    assert place.store().names() == []
    if place.is_sql:
        for table in ("sessions", "saves", "media", "outcomes"):
            assert place.sql(f"SELECT * FROM wink_{table}") == []
    else:
        assert os.listdir(place.where) == []


def test_media_are_stored_once_and_read_when_they_are_needed(place: Place):
    picture = Media(b"GIF89a" * 1000)
    with place.create() as saved:
        for _ in range(3):
            saved.session.dispatch(Seen(picture))
            saved.save()
        saved.compact()

    with place.opened() as again:
        assert [each.text for each in again.session[Seen].all()] == [picture] * 3
    if place.is_sql:
        assert len(place.sql("SELECT digest FROM wink_media")) == 1
        place.sql("DELETE FROM wink_media")
    else:
        (stored,) = (Path(place.where) / NAME).with_suffix(".media").iterdir()
        stored.unlink()
    with pytest.raises(SnapshotError, match="cannot be read"), place.opened() as again:
        again.session[Seen].all()


def test_media_that_were_changed_are_refused(database: Place):
    with database.create() as saved:
        saved.session.dispatch(Seen(Media(b"GIF89a" * 1000)))
    digit = "'\\x00'" if "postgres" in database.where else "x'00'"
    database.sql(f"UPDATE wink_media SET data = {digit}")

    with pytest.raises(SnapshotError, match="digest is wrong"), database.opened() as again:
        again.session[Seen].all()


def test_attached_lines_are_saved_with_the_session(place: Place):
    first, second = Lines("a", 'b "quoted" ü'), Lines()
    with place.create() as saved:
        saved.attach(first)
        saved.attach(second)
        saved.save()  # nothing else has changed
        assert (first.lines, saved.attached) == ([], ("a", 'b "quoted" ü'))
        second.lines.append("half \ud800")
        saved.session.dispatch(Note("with it"))

    with place.opened() as again:
        third = Lines("later")
        again.attach(third)
        again.save()
        assert again.attached == ("a", 'b "quoted" ü', "half \ud800", "later")
        again.compact()
        third.lines += ["last"]
    data = SavedSessionData.read(place.store().log(NAME))
    assert data.files == ["a", 'b "quoted" ü', "half \ud800", "later", "last"]
    assert data.resumed == []


def test_attached_lines_count_as_saved_only_when_they_are(database: Place):
    with database.create() as saved:
        lines = Lines("a")
        saved.attach(lines)
        expire(database)
        with database.opened() as other:
            with pytest.raises(LeaseLost):
                saved.save()
            assert (lines.lines, saved.attached, other.attached) == (["a"], (), ())
        with pytest.raises(LeaseLost):
            saved.close()


def test_a_session_is_compacted_to_its_state(place: Place):
    with place.create() as saved:
        for n in range(300):
            saved.session.dispatch(Price(str(n % 3), n))
            saved.session.dispatch(Seen(n))
            saved.save()
        saved.mark_resumed()
        at = saved.state_at(("store_world:Seen", 10))[0]
        assert [each.cents for each in at.state[Price].all()] == [9, 7, 8]
        before = SavedSessionData.read(place.store().log(NAME))

        saved.compact()
        data = SavedSessionData.read(place.store().log(NAME))
        assert (data.state, data.log, data.resumed) == (before.state, before.log, before.resumed)
        assert len(data.saves) < 10 < 300 < len(before.saves)
        with pytest.raises(SnapshotError, match="compacted"):
            saved.state_at(("store_world:Seen", 10))

        saved.session.dispatch(Price("0", 1000))
        saved.session.dispatch(Seen("after"))
        saved.save()
        at = saved.state_at(("store_world:Seen", 300))[0]
        assert [each.cents for each in at.state[Price].all()] == [297, 298, 299]
        expected = content(saved.session)

    compact_session(NAME, store=place.store())
    with place.opened() as again:
        assert content(again.session) == expected


def test_a_compaction_that_fails_changes_nothing(place: Place, monkeypatch: pytest.MonkeyPatch):
    with place.create() as saved:
        saved.session.dispatch(Note("here"))
        saved.save()
        if place.is_sql:
            expire(place)
            place.store().open(NAME).close()
        else:
            monkeypatch.setattr(os, "replace", _no_room)
        with pytest.raises((OSError, LeaseLost)):
            saved.compact()
        monkeypatch.undo()
        with contextlib.suppress(LeaseLost):
            saved.close()
    assert place.store().names() == [NAME]
    with place.opened() as again:
        assert again.session[Note].all() == (Note("here"),)


def _no_room(*_: object) -> None:
    raise OSError("no space left on device")


def test_who_waits_for_a_file_that_is_compacted_gets_the_new_one(tmp_path: Path):
    place = Place(str(tmp_path))
    with place.create() as saved, Child(place) as child:
        saved.session.dispatch(Note("a"))
        assert child.ask("open") == "SessionInUse"
        child.tell("open 600")
        saved.compact()
        assert not saved.path.with_suffix(".new").exists()
        saved.close()
        assert child.line() == "0"
        assert child.ask("note b") == "done"
        assert child.ask("close") == "done"
    with place.opened() as again:
        assert again.session[Note].all() == (Note("a"), Note("b"))


def test_a_reader_follows_a_session_also_through_a_compaction(database: Place):
    with database.create() as saved:
        reader = Saves(database.store().log(NAME))
        data = reader.head
        for n in range(5):
            saved.session.dispatch(Note(str(n)))
            saved.save()
            if n == 2:
                saved.compact()
            if n != 1:
                for _, save in reader.new():
                    data.add(save)
        assert [each["fields"]["text"] for each in data.state["store_world:Note"]] == list("01234")


def test_a_session_of_3000_records_opens_without_parsing_its_past(place: Place):
    with place.create() as saved:
        for n in range(3000):
            saved.session.dispatch(Seen(n))
            if n < 100 or n % 10 == 0:
                saved.save()
        expected = content(saved.session)
    if place.is_sql:
        place.sql("UPDATE wink_saves SET text = '{\"at\":' WHERE number = 9")

    with place.opened() as again:
        assert again.session[Seen].latest() == Seen(2999)
        again.session.dispatch(Seen("more"))
        if place.is_sql:
            with pytest.raises(SnapshotError, match="save 9 cannot be read"):
                again.session[Seen].all()
        else:
            assert again.session[Seen].all() == (*expected[Seen], Seen("more"))


def test_a_damaged_log_is_not_continued(place: Place):
    with place.create() as saved:
        for n in range(5):
            saved.session.dispatch(Note(str(n)))
            saved.save()
    if place.is_sql:
        place.sql("DELETE FROM wink_saves WHERE number = 4")
    else:
        path = Path(place.where) / NAME
        path.write_bytes(path.read_bytes().replace(b'"text":"3"', b'"text":"x"'))

    with pytest.raises(SnapshotError, match="cannot be resumed"):
        SavedSession.open(NAME, store=place.store(), types=KINDS)
    assert not place.store().is_in_use(NAME)
    data = SavedSessionData.read(place.store().log(NAME), partly=True)
    assert data.damage
    assert [each["fields"]["text"] for each in data.state["store_world:Note"]] == list("012")


def test_what_is_not_the_log_of_a_session_is_refused(database: Place):
    database.create().close()
    database.sql("UPDATE wink_sessions SET head = '[1]'")

    with pytest.raises(SnapshotError, match="not the file of a session"):
        SavedSession.open(NAME, store=database.store())
    database.sql("DELETE FROM wink_sessions")
    with pytest.raises(FileNotFoundError):
        SavedSession.open(NAME, store=database.store())


@pytest.mark.heavy
def test_a_killed_process_loses_at_most_the_save_in_progress(place: Place):
    place.create().close()
    chance = random.Random(1)
    for _ in range(4):
        with Child(place, lease=1.0) as child:
            child.ask("open 600")
            child.tell("notes")
            last = [child.line() for _ in range(chance.randrange(1, 30))][-1]
            child.process.send_signal(signal.SIGKILL)
            last = [last, *child.rest()][-1]
        with place.opened(wait=600) as again:
            texts = [each.text for each in again.session[Note].all()]
        assert texts == [str(n) for n in range(len(texts))]
        assert int(last) < len(texts) <= int(last) + 2


SAVES = st.lists(
    st.one_of(
        st.builds(Note, st.text()),
        st.builds(Plan, st.tuples(st.text())),
        st.builds(Price, st.sampled_from("abc"), st.integers()),
        st.builds(Seen, st.one_of(st.text(), st.binary(), st.dictionaries(st.text(), st.floats()))),
        st.builds(lambda data: Seen(Media(b"GIF89a" + data * 300)), st.binary(max_size=4)),
        st.sampled_from(["save", "reset", "compact", "reopen", "resumed"]),
        st.lists(st.text(), max_size=2),
    ),
    max_size=30,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(SAVES)
def test_any_sequence_of_saves_is_read_back(place: Place, steps: list[Any]):
    store = place.store()
    SavedSession.delete(NAME, store=store) if NAME in store.names() else None
    expected: list[str] = []
    saved, lines = place.create(), Lines()
    saved.attach(lines)
    try:
        for step in steps:
            if step == "save":
                saved.save()
            elif step == "reset":
                saved.session.reset()
            elif step == "compact":
                saved.compact()
            elif step == "resumed":
                saved.mark_resumed()
            elif step == "reopen":
                now = content(saved.session)
                saved.close()
                saved = SavedSession.open(NAME, store=store, types=KINDS)
                saved.session[Plan].register(Plan, lambda _, plan: [plan])
                saved.attach(lines)
                assert repr(content(saved.session)) == repr(now)
            elif isinstance(step, list):
                lines.lines += step
                expected += step
            else:
                saved.session.dispatch(step)
        now = content(saved.session)
    finally:
        saved.close()
    with place.opened() as again:
        assert repr(content(again.session)) == repr(now)  # NaN is not equal to itself
        assert again.attached == tuple(expected)
    whole = SavedSessionData.read(store.log(NAME))
    session = Session.from_snapshot(whole.snapshot(KINDS))
    assert repr(content(session)) == repr(now)
    assert whole.files == expected


# Copies


@pytest.mark.parametrize("other", ["files", "sqlite"])
def test_a_copy_follows_its_source(place: Place, tmp_path: Path, other: str):
    where = f"sqlite:///{tmp_path}/copy.db" if other == "sqlite" else str(tmp_path / "copies")
    source = place.store()
    with Place(where) as target, place.create() as saved:
        saved.session.dispatch(Seen(Media(b"GIF89a" * 1000)))
        saved.save()
        assert copy_session(source, NAME, target.store()) == 1
        assert copy_session(source, NAME, target.store()) == 0
        for n in range(3):
            saved.session.dispatch(Note(str(n)))
            saved.save()
        assert copy_session(source, NAME, target.store()) == 3
        with target.opened() as copy:
            assert content(copy.session) == content(saved.session)
        saved.compact()
        assert copy_session(source, NAME, target.store()) == 3
        saved.session.dispatch(Note("more"))
        saved.save()
        assert copy_session(source, NAME, target.store()) == 1
        with target.opened() as copy:
            assert content(copy.session) == content(saved.session)
            assert copy.session.session_id == saved.session.session_id

        SavedSession.create("other", Session(), store=source).close()
        with pytest.raises(FileExistsError):
            copy_session(source, "other", target.store(), NAME)
        assert copy_session(source, NAME, target.store(), "another") == 4


# Leases


def test_a_lease_that_has_expired_is_taken_over_and_the_former_holder_is_fenced(database: Place):
    with database.create() as saved:
        assert saved.token == 1
        saved.session.dispatch(Note("before"))
        saved.save()
        expire(database)
        with database.opened() as other:
            assert other.token == 2
            saved.session.dispatch(Note("of a ghost"))
            with pytest.raises(LeaseLost):
                saved.save()
            with pytest.raises(LeaseLost):
                saved.mark_resumed()
            with pytest.raises(LeaseLost):
                saved.compact()
            assert database.store().is_in_use(NAME)
            other.session.dispatch(Note("after"))
        with pytest.raises(LeaseLost):
            saved.close()
    with database.opened() as again:
        assert again.token == 3
        assert again.session[Note].all() == (Note("before"), Note("after"))


def test_a_ghost_that_closes_does_not_release_the_lease_of_its_successor(database: Place):
    saved = database.create()
    expire(database)
    with database.opened():
        saved.close()  # nothing to save
        assert database.store().is_in_use(NAME)


def test_an_expired_lease_that_nobody_took_over_is_renewed_by_the_next_save(database: Place):
    with database.create() as saved:
        expire(database)
        assert not database.store().is_in_use(NAME)
        saved.session.dispatch(Note("a"))
        saved.save()
        assert database.store().is_in_use(NAME)


def test_a_lease_is_renewed_while_the_session_is_open(database: Place):
    with database.create(lease=0.3):
        expires = "SELECT expires FROM wink_sessions"
        first = database.sql(expires)
        while database.sql(expires) == first:
            threading.Event().wait(0.05)


def test_a_process_that_was_paused_beyond_its_lease_changes_nothing(database: Place):
    database.create().close()
    with Child(database, lease=1.0) as child:
        assert child.ask("open") == "2"
        assert child.ask("begin call-1") == "done"
        child.process.send_signal(signal.SIGSTOP)
        with database.opened(wait=600) as other:  # until the lease has expired
            assert other.token == 3
            assert other.ledger is not None
            found = other.ledger.find("call-1")
            assert found is not None
            assert found.outcome == "unknown"
            child.process.send_signal(signal.SIGCONT)
            assert child.ask("end call-1") == "done"  # that is saved with the session
            assert child.ask("note of a ghost") == "LeaseLost"
            assert child.ask("begin call-2") == "LeaseLost"
            assert other.ledger.find("call-1") == found
            assert other.ledger.find("call-2") is None
    with database.opened() as again:
        assert again.session[Note].all() == ()


def test_a_process_that_dies_leaves_a_lease_that_expires(database: Place):
    database.create().close()
    with Child(database, lease=1.0) as child:
        assert child.ask("open") == "2"
        assert child.ask("note a") == "done"
        child.process.send_signal(signal.SIGKILL)
        with database.opened(wait=600) as other:
            assert (other.token, other.session[Note].all()) == (3, (Note("a"),))


def test_a_lease_has_a_length(tmp_path: Path):
    with (
        Place(f"sqlite:///{tmp_path}/a.db") as place,
        pytest.raises(ValueError, match="lease must be positive"),
    ):
        place.store(lease=0)


# Connections


class ForgetfulDatabase(Database):
    """Loses the connection after the next commit: nobody knows whether it took effect."""

    loses = False

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Any]:
        with super().transaction() as transaction:
            yield transaction
        if self.loses:
            self.loses = False
            raise DatabaseUnavailable("the connection was lost")


def _work(saved: SavedSession, lose: Any) -> None:
    """Do each kind of write, with the connection lost while it is committed."""
    assert saved.ledger is not None
    for n in range(3):
        saved.session.dispatch(Note(str(n)))
        saved.session.dispatch(Seen(Media(b"GIF89a" * 1000 + bytes([n]))))
        lose()
        saved.save()
    lose()
    saved.ledger.begin("call-1", "send", 1.0)
    lose()
    saved.ledger.end(CallOutcome("call-1", "send", "committed", 1.0, "sent"))
    lose()
    saved.compact()


def _check(place: Place) -> None:
    with place.opened() as again:
        assert again.session[Note].all() == tuple(Note(str(n)) for n in range(3))
        assert len(again.session[Seen].all()) == 3
        assert again.ledger is not None
        (found,) = again.ledger.calls()
        assert (found.outcome, found.message) == ("committed", "sent")


def test_a_commit_whose_success_is_not_known_is_repeated_once(database: Place):
    forgetful = ForgetfulDatabase(database.where)
    store = SqlStore(forgetful)

    def lose() -> None:
        forgetful.loses = True

    lose()
    with SavedSession.create(NAME, new_session(), store=store) as saved:
        _work(saved, lose)
    lose()
    with SavedSession.open(NAME, store=store, types=KINDS) as saved:
        assert saved.token == 2
    forgetful.close()
    _check(database)


@pytest.mark.heavy
def test_postgres_commits_and_the_answer_is_lost(postgres: Postgres):
    proxy = CuttingProxy(postgres.port)
    with Place(postgres.new_database()) as place:
        url = place.where.replace(f":{postgres.port}/", f":{proxy.port}/")
        with Place(url) as through, through.create() as saved:
            _work(saved, proxy.cut.set)
        assert proxy.cuts == 6
        _check(place)
    proxy.close()


@pytest.mark.heavy
def test_dropped_connections_are_replaced(postgres: Postgres):
    drop = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    url = postgres.new_database()
    with Place(url) as place, Place(url) as other:
        with place.create() as saved:
            _work(saved, lambda: other.sql(drop))
        _check(place)


@pytest.mark.heavy
def test_connections_that_were_lost_together_fail_one_transaction(postgres: Postgres):
    url = postgres.new_database()
    database, other = Database(url), Database(url)
    with contextlib.ExitStack() as several:
        for _ in range(5):
            several.enter_context(database.transaction()).execute("SELECT 1")
    with other.transaction() as transaction:
        transaction.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )

    with pytest.raises(DatabaseUnavailable), database.transaction() as transaction:
        transaction.execute("SELECT 1")
    with database.transaction() as transaction:
        assert transaction.execute("SELECT 1") == [(1,)]
    database.close()
    other.close()


@pytest.mark.heavy
def test_a_database_that_restarts_is_waited_for():
    with started_postgres() as server, Place(server.new_database()) as place:
        with place.create() as saved:
            saved.session.dispatch(Note("before"))
            saved.save()
            server.restart()
            saved.session.dispatch(Note("after"))
            saved.save()
            server.stop()
            start = threading.Thread(target=server.start)
            saved.session.dispatch(Note("meanwhile"))
            start.start()
            saved.save()
            start.join()
        with place.opened() as again:
            assert [each.text for each in again.session[Note].all()] == [
                "before",
                "after",
                "meanwhile",
            ]


@pytest.mark.heavy
def test_a_database_that_stays_away_is_an_error_and_the_next_save_includes_it():
    with started_postgres() as server, Place(server.new_database()) as place:
        with place.create(patience=0.0) as saved:
            saved.session.dispatch(Note("before"))
            server.stop()
            with pytest.raises(DatabaseUnavailable):
                saved.save()
            server.start()
            with contextlib.suppress(DatabaseUnavailable):  # an old connection
                saved.save()
        with place.opened() as again:
            assert again.session[Note].all() == (Note("before"),)


def test_tables_of_a_newer_version_are_left_alone(database: Place):
    database.create().close()
    database.sql("UPDATE wink_tables SET version = 99")

    with pytest.raises(StoreRefused, match="update it"):
        database.store()


# The ledger


@pytest.fixture
def ledgers(place: Place) -> Iterator[Any]:
    """A ledger and, on demand, the same one of a later process."""
    with contextlib.ExitStack() as stack:
        if place.is_sql:
            place.create().close()

        def next_one() -> OutcomeLedger:
            if not place.is_sql:
                return OutcomeLedger(Path(place.where) / "outcomes.jsonl")
            expire(place)
            saved = SavedSession.open(NAME, store=place.store())
            stack.callback(saved.close)
            assert saved.ledger is not None
            assert saved.ledger is saved.ledger
            return saved.ledger

        yield next_one


def ended(call_id: str, **fields: Any) -> CallOutcome:
    return CallOutcome(call_id, "send", "committed", 2.0, "sent \0 it", **fields)


def test_a_call_begins_once_and_its_outcome_is_found(ledgers: Any):
    ledger: OutcomeLedger = ledgers()
    ledger.begin("1", "send", 1.0)
    with pytest.raises(OutcomeOnRecord, match="under way"):
        ledger.begin("1", "send", 1.0)
    found = ledger.find("1")
    assert found is not None
    assert found.outcome == "started"
    ledger.answer(ended("1", files=True))
    assert ledger.find("1").outcome == "started"  # type: ignore[union-attr]
    ledger.end(ended("1"))
    assert ledger.find("1") == ended("1")
    with pytest.raises(OutcomeOnRecord, match="taken effect already"):
        ledger.begin("1", "send", 1.0)
    ledger.begin("k:2", "send", 1.0)
    ledger.end(CallOutcome("k:2", "send", "rolled_back", 3.0))
    ledger.begin("k:2", "send", 4.0)
    ledger.end(ended("k:2"))
    assert [each.call_id for each in ledger.calls()] == ["1", "k:2"]
    assert [each.call_id for each in ledger.calls("k:")] == ["k:2"]
    assert ledger.find("3") is None
    assert ledger.damage() == ""


def test_a_call_of_a_process_that_is_gone_is_unknown_until_someone_settles_it(
    ledgers: Any,
):
    ledger: OutcomeLedger = ledgers()
    for call_id in ("1", "2"):
        ledger.begin(call_id, "send", 1.0)

    ledger = ledgers()
    assert [each.call_id for each in ledger.unsettled()] == ["1", "2"]
    with pytest.raises(OutcomeOnRecord, match="not known"):
        ledger.begin("1", "send", 1.0)
    ledger.settle("1", "committed")
    with pytest.raises(OutcomeOnRecord, match="taken effect already"):
        ledger.begin("1", "send", 1.0)
    asked: list[str] = []

    def resolve(found: CallOutcome) -> Any:
        asked.append(found.call_id)
        return "rolled_back"

    ledger.resolve = resolve
    ledger.begin("2", "send", 5.0)
    assert asked == ["2"]
    with pytest.raises(WinkError, match="not on record"):
        ledger.settle("9", "committed")
    with pytest.raises(ValueError, match="settled as"):
        ledger.settle("1", "started")


def test_how_a_call_ended_is_saved_with_its_session(database: Place):
    """One transaction has both: before it, nobody can say how the call ended."""
    with database.create() as saved:
        assert saved.ledger is not None
        saved.ledger.begin("1", "send", 1.0)
        saved.ledger.answer(ended("1"))
        saved.ledger.end(ended("1"))
        assert saved.ledger.find("1") == ended("1")
        seen = database.store().ledger(NAME)
        assert seen.find("1").outcome == "started"
        saved.session.dispatch(Note("a"))
        saved.save()
        assert seen.find("1") == ended("1")
        saved.ledger.begin("2", "send", 1.0)
        saved.ledger.end(CallOutcome("2", "send", "rolled_back", 1.0))
        saved.ledger.begin("2", "send", 2.0)
    assert [each.call_id for each in seen.unsettled()] == ["2"]


def test_anyone_may_look_at_the_outcomes_of_a_session_and_settle_them(database: Place):
    with database.create() as saved:
        assert saved.ledger is not None
        saved.ledger.begin("1", "send", 1.0)
        seen = database.store().ledger(NAME)
        assert seen.find("1").outcome == "started"
        with pytest.raises(LeaseLost):
            seen.begin("2", "send", 1.0)
    assert [each.call_id for each in seen.unsettled()] == ["1"]
    seen.settle("1", "committed")
    with database.opened() as again:
        assert again.ledger is not None
        assert again.ledger.find("1").outcome == "committed"  # type: ignore[union-attr]


def test_a_file_has_no_ledger_of_its_own(tmp_path: Path):
    with Place(str(tmp_path)).create() as saved:
        assert (saved.ledger, saved.token) == (None, 0)


def test_the_lines_in_a_database_are_those_of_a_file(tmp_path: Path):
    with Place(f"sqlite:///{tmp_path}/a.db") as place:
        with place.create() as saved:
            saved.session.dispatch(Note("a"))
        copy_session(place.store(), NAME, FileStore(tmp_path))
        rows = [text for (text,) in place.sql("SELECT text FROM wink_saves ORDER BY number")]

    lines = (tmp_path / NAME).read_text().splitlines()
    assert [line[33:] for line in lines[1:]] == rows
    assert json.loads(lines[0][33:])["wink_session"] == 2
