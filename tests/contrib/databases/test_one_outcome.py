"""After a kill, files, session and database are all there, or none of them; never twice."""

from __future__ import annotations

import json
import multiprocessing
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import weakincentives as wink
from chance import HEAVY, SEED, THOROUGH, dice, is_time_left
from postgres import Postgres
from weakincentives.contrib.databases import Database, SqlDatabase, SqliteDatabase
from weakincentives.errors import ResourceError
from weakincentives.runtime import SavedSession, Session, ToolInvoked

CHILD = Path(__file__).with_name("outcome_child.py")
KILLS = 1000 if THOROUGH else 100 if HEAVY else 6


def check(found: Any, with_files: bool) -> None:
    assert found["databases"] == [found["session"]] * len(found["databases"])
    assert found["records"] == found["session"]
    assert found["files"] == (found["session"] if with_files else [])
    assert found["unknown"] == 0
    assert found["session"] == list(range(1, len(found["session"]) + 1))


def kill_again_and_again(folder: Path, kills: int, with_files: bool, urls: list[str]) -> int:
    """Each run finds what the kill of the one before has left. Returns how many were killed."""
    (folder / "work").mkdir()
    words = [str(folder), "files" if with_files else "none", *urls]
    calls = killed = 0
    with subprocess.Popen(
        [sys.executable, CHILD, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as runs:
        assert runs.stdin is not None
        assert runs.stdout is not None
        for seed in [*(dice("kill", folder.name, n).getrandbits(31) for n in range(kills)), -1]:
            runs.stdin.write(f"{seed}\n")
            runs.stdin.flush()
            done = json.loads(runs.stdout.readline())
            assert done["end"] in ((0,) if seed < 0 else (0, -signal.SIGKILL)), seed
            check(done["found"], with_files)
            assert len(done["found"]["session"]) >= calls, seed
            calls, killed = len(done["found"]["session"]), killed + (done["end"] != 0)
        runs.stdin.close()
    assert killed
    return killed


def kill_everywhere(
    kinds: list[str],
    folder: Path,
    request: pytest.FixtureRequest,
    *,
    with_files: bool = True,
    track: bool = True,
) -> None:
    """Kill in one session after the other, so that none gets long."""
    killed = 0
    for n in range(0, KILLS, 100):
        if n and not is_time_left():
            break
        here = folder / str(n)
        here.mkdir()
        urls = [prepare(kind, here, request, track=track) for kind in kinds]
        killed += kill_again_and_again(here, min(100, KILLS - n), with_files, urls)
        sys.stdout.write(f"{killed} kills with the seed {SEED}\n")
    assert killed >= KILLS // 3 or not is_time_left()


def prepare(kind: str, folder: Path, request: pytest.FixtureRequest, *, track: bool) -> str:
    if kind == "postgres":
        import sqlalchemy

        server: Postgres = request.getfixturevalue("postgres")
        url = server.new_database().replace("postgresql:", "postgresql+psycopg:")
        database: Any = SqlDatabase(sqlalchemy.create_engine(url))
    else:
        url = f"sqlite:{folder / kind}.db"
        database = SqliteDatabase(folder / f"{kind}.db")
    with database.transaction() as db:
        db.execute("CREATE TABLE entry (n INTEGER PRIMARY KEY)")
    if track:
        database.track("entry")
    else:
        database.record_calls()
    database.close()
    return url


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.parametrize("with_files", [False, True], ids=["session", "files"])
def test_after_a_kill_everything_is_there_or_nothing(
    kind: str, with_files: bool, tmp_path: Path, request: pytest.FixtureRequest
):
    kill_everywhere([kind], tmp_path, request, with_files=with_files, track=with_files)


def call_once(url: str, folder: Path) -> None:
    """Make a call whose session is saved."""
    import sqlalchemy

    database = SqlDatabase(sqlalchemy.create_engine(url))
    with SavedSession.create(folder / "session.jsonl", Session()) as saved:
        resources = {Database: database}
        wink.ToolRegistry([enter], session=saved.session, resources=resources).execute("enter")


@wink.tool(reach="reversible")
def enter(*, context: wink.ToolContext) -> None:
    """Enter a number."""
    context.resources.get(Database).execute("INSERT INTO entry VALUES (1)")


def test_a_commit_that_the_server_carries_out_after_the_kill_is_waited_for(
    tmp_path: Path, request: pytest.FixtureRequest
):
    import sqlalchemy

    url = prepare("postgres", tmp_path, request, track=True)
    engine = sqlalchemy.create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in (
            "CREATE FUNCTION pause() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN PERFORM pg_advisory_lock(7); RETURN NULL; END $$",
            "CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON entry DEFERRABLE INITIALLY DEFERRED"
            " FOR EACH ROW EXECUTE FUNCTION pause()",
            "SELECT pg_advisory_lock(7)",
        ):
            connection.execute(sqlalchemy.text(statement))
        child = multiprocessing.get_context("spawn").Process(target=call_once, args=(url, tmp_path))
        child.start()
        waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        while not connection.execute(sqlalchemy.text(waits)).scalar_one():
            assert child.is_alive()
            time.sleep(0.02)
        child.kill()
        child.join()
        with SavedSession.open(tmp_path / "session.jsonl") as saved:
            impatient = SqlDatabase(sqlalchemy.create_engine(url), patience=0.1)
            with pytest.raises(ResourceError, match="still under way in the database"):
                saved.recover_rows([impatient])
            impatient.close()
            connection.execute(sqlalchemy.text("SELECT pg_advisory_unlock(7)"))
            database = SqlDatabase(sqlalchemy.create_engine(url))
            saved.recover_rows([database])

            (record,) = saved.session[ToolInvoked].all()
            assert record.success
            with database.transaction(read_only=True) as db:
                assert db.execute("SELECT n FROM entry").scalar_one() == 1
        database.close()
    engine.dispose()


def test_with_two_databases_a_kill_between_their_commits_is_undone(
    tmp_path: Path, request: pytest.FixtureRequest
):
    kill_everywhere(["one", "two"], tmp_path, request)
