"""Stores of sessions to test: a directory, SQLite and PostgreSQL; and what is saved in them."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from weakincentives.runtime import (
    Database,
    FileStore,
    SavedSession,
    Session,
    SlicePolicy,
    SqlStore,
    replace_latest,
    slice_policy,
    upsert_by,
)

CHILD = Path(__file__).with_name("store_child.py")
NAME = "20261118-0142-k3f.jsonl"


@dataclass(frozen=True)
class Note:
    """A STATE slice that grows."""

    text: str


@dataclass(frozen=True)
class Plan:
    """A STATE slice of one value."""

    steps: tuple[str, ...]


@dataclass(frozen=True)
class Price:
    """A STATE slice with a value a key."""

    name: str
    cents: int


@slice_policy(SlicePolicy.LOG)
@dataclass(frozen=True)
class Seen:
    text: object


KINDS = (Note, Plan, Price, Seen)


def new_session() -> Session:
    session = Session(tags={"of": "a test"})
    session[Plan].register(Plan, replace_latest)
    session[Price].register(Price, upsert_by(lambda price: price.name))
    return session


def content(session: Session) -> dict[type, tuple[Any, ...]]:
    return {kind: session[kind].all() for kind in KINDS}


class Place:
    """Where a store is: another process finds it by the same text."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.is_sql = "://" in where
        self.database = Database(where) if self.is_sql else None

    def store(self, **options: Any) -> Any:
        return (
            FileStore(self.where) if self.database is None else SqlStore(self.database, **options)
        )

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        if self.database is not None:
            self.database.close()

    @contextmanager
    def opened(self, **options: Any) -> Iterator[SavedSession]:
        with SavedSession.open(NAME, store=self.store(), types=KINDS, **options) as saved:
            yield saved

    def create(self, session: Session | None = None, **options: Any) -> SavedSession:
        store = self.store(**options)
        return SavedSession.create(NAME, session or new_session(), store=store)

    def sql(self, text: str) -> list[tuple[Any, ...]]:
        """Do something to the database behind the back of the store."""
        assert self.database is not None
        return self.database.repeat(lambda transaction: transaction.execute(text))


ALL = ["files", "sqlite", pytest.param("postgres", marks=pytest.mark.heavy)]
SQL = ALL[1:]


def place_of(request: pytest.FixtureRequest) -> Place:
    """Return the place that a test is to use; it must be closed."""
    if request.param == "postgres":
        return Place(request.getfixturevalue("postgres").new_database())
    tmp_path: Path = request.getfixturevalue("tmp_path")
    return Place(str(tmp_path) if request.param == "files" else f"sqlite:///{tmp_path}/wink.db")


class Child:
    """Another process, which does as it is told, one line after the other."""

    def __init__(self, place: Place, *, lease: float = 30.0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), place.where, str(lease)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, words: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{words}\n")
        self.process.stdin.flush()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def ask(self, words: str) -> str:
        self.tell(words)
        return self.line()

    def rest(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.read().splitlines()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


class CuttingProxy:
    """Stands between a client and PostgreSQL; cuts the connection after a COMMIT, if it is told to.

    The server has committed, and the client does not know.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.cut = threading.Event()
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                threading.Thread(target=self._requests, args=(client, server), daemon=True).start()
                threading.Thread(target=self._pass, args=(server, client), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(1 << 16):
                if self.cut.is_set() and b"COMMIT" in data:
                    self.cut.clear()
                    self.cuts += 1
                    client.shutdown(socket.SHUT_RDWR)
                server.sendall(data)
        with suppress(OSError):
            server.shutdown(socket.SHUT_WR)

    def _pass(self, server: socket.socket, client: socket.socket) -> None:
        with server, client, suppress(OSError):
            while data := server.recv(1 << 16):
                client.sendall(data)

    def close(self) -> None:
        self._listener.close()
