"""After a kill, files, session and database are all there, or none of them; never twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chance import HEAVY, SEED, THOROUGH
from postgres import Postgres
from weakincentives.contrib.databases import SqlDatabase, SqliteDatabase

CHILD = Path(__file__).with_name("outcome_child.py")
KILLS = 1000 if THOROUGH else 60 if HEAVY else 3


def run(folder: Path, seed: int, with_files: bool, urls: list[str]) -> Any:
    done = subprocess.run(
        [sys.executable, CHILD, folder, str(seed), "files" if with_files else "none", *urls],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    if seed >= 0:
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        return done.returncode
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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
    (tmp_path / "work").mkdir()
    urls = [prepare(kind, tmp_path, request, track=with_files)]
    kills = 0
    for n in range(KILLS):
        kills += run(tmp_path, SEED + n, with_files, urls) != 0

        found = run(tmp_path, -1, with_files, urls)

        assert found["databases"] == [found["session"]]
        assert found["records"] == found["session"]
        assert found["files"] == (found["session"] if with_files else [])
        assert found["unknown"] == 0
        assert found["session"] == list(range(1, len(found["session"]) + 1))
    assert kills
    if THOROUGH:
        assert kills > KILLS // 2


def test_with_two_databases_a_kill_between_their_commits_is_undone(
    tmp_path: Path, request: pytest.FixtureRequest
):
    (tmp_path / "work").mkdir()
    urls = [prepare(kind, tmp_path, request, track=True) for kind in ("one", "two")]
    for n in range(KILLS):
        run(tmp_path, SEED + n, True, urls)

        found = run(tmp_path, -1, True, urls)

        assert found["databases"] == [found["session"]] * 2
        assert found["files"] == found["session"] == found["records"]
