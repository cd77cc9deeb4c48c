"""Object storage: a local directory, a bucket, or a table of the database.

All of them keep bytes by their digest, as :class:`~weakincentives.filesystem.ObjectStorage` says.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.errors import MissingExtra, ObjectMissing, StorageUnavailable
from weakincentives.filesystem.transfer import ObjectStorage
from weakincentives.runtime.stores.database import Database, Transaction, prepare_tables

T = TypeVar("T")

_KEY = re.compile("[0-9a-f]{64}")
_DAY = 86_400.0
_AT_ONCE = 16
"""Requests to a bucket at the same time."""
_IN_STATEMENT = 500


class CollectableObjects(ObjectStorage, Protocol):
    """Object storage that can be cleaned up."""

    def ages(self) -> Iterator[tuple[str, float]]:
        """Yield all keys, each with the seconds since it was last stored or asked for."""
        ...

    def remove(self, keys: Iterable[str]) -> None:
        """Remove objects; missing ones are fine."""
        ...


def open_objects(url: str, database: Database | None = None) -> CollectableObjects:
    """Return the object storage that a URL names.

    Args:
        url: A directory (a path, or ``dir:PATH``), ``database:`` for a table, or the URL of a
            bucket with an optional prefix, as obstore takes it (``s3://bucket/prefix``).
        database: For ``database:``.
    """
    scheme, colon, rest = url.partition(":")
    if scheme == "database" and colon:
        if database is None:
            raise ValueError("objects in the database need a database")
        return DatabaseObjects(database)
    if "://" in url:
        return BucketObjects(url)
    place = rest if scheme == "dir" and colon else url
    if not place:
        raise ValueError("expected a directory, database: or the URL of a bucket, got nothing")
    return LocalObjects(place)


def collect(
    objects: CollectableObjects, needed: Iterable[str], *, older_than: float = 7 * _DAY
) -> int:
    """Remove the objects that nothing needs; returns how many.

    An upload stores objects before anything refers to them, and may refer to objects that exist
    already. So only those are removed that no upload has asked for in the last ``older_than``
    seconds: it must exceed the time from the begin of an upload until its lines are saved.

    Args:
        objects: Where they are.
        needed: The keys that ``stored_keys`` and ``line_keys`` return for all bases and branches.
    """
    kept = set(needed)
    old = [key for key, age in objects.ages() if age > older_than and key not in kept]
    objects.remove(old)
    return len(old)


def _checked(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise ValueError(f"not the digest of an object: {key!r}")
    return key


def _missing(key: str, place: str) -> ObjectMissing:
    return ObjectMissing(f"the object {key} is not in {place}")


class LocalObjects:
    """Objects as files in a directory, which machines may share."""

    def __init__(self, directory: str | os.PathLike[str], *, safe: bool = False) -> None:
        self.directory = Path(directory)
        self._safe = safe
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise self._failed(error) from error

    def put(self, key: str, data: bytes) -> None:
        place = self._place(key)
        staged = self.directory / f"new-{os.urandom(8).hex()}"
        try:
            place.parent.mkdir(mode=0o700, exist_ok=True)
            try:
                with open(staged, "xb") as file:
                    file.write(data)
                    if self._safe:
                        file.flush()
                        os.fsync(file.fileno())
                os.rename(staged, place)
            except BaseException:
                staged.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise self._failed(error) from error

    def get(self, key: str) -> bytes:
        try:
            return self._place(key).read_bytes()
        except FileNotFoundError:
            raise _missing(key, str(self.directory)) from None
        except OSError as error:
            raise self._failed(error) from error

    def missing(self, keys: Iterable[str]) -> set[str]:
        return {key for key in keys if not self._touch(key)}

    def _touch(self, key: str) -> bool:
        """Tell whether there is an object, and note that someone may refer to it now."""
        place = self._place(key)
        try:
            os.utime(place)
        except FileNotFoundError:
            return False
        except OSError:  # of another user, or read-only: then it is not collected either
            return place.exists()
        return True

    def ages(self) -> Iterator[tuple[str, float]]:
        now = SYSTEM_CLOCK.time()
        for place in self.directory.glob("*/*"):
            key = place.parent.name + place.name
            if _KEY.fullmatch(key):
                with contextlib.suppress(FileNotFoundError):
                    yield key, now - place.lstat().st_mtime

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._place(key).unlink(missing_ok=True)
        now = SYSTEM_CLOCK.time()
        for staged in self.directory.glob("new-*"):  # of killed processes
            with contextlib.suppress(FileNotFoundError):
                if now - staged.lstat().st_mtime > _DAY:
                    staged.unlink()

    def _place(self, key: str) -> Path:
        return self.directory / _checked(key)[:2] / key[2:]

    def _failed(self, error: OSError) -> StorageUnavailable:
        return StorageUnavailable(f"objects in {self.directory}: {error.strerror or error}")


class BucketObjects:
    """Objects in a bucket: S3 or whatever speaks its language, or any other that obstore knows.

    Keys and endpoint come from the environment, as for other programs: ``AWS_ACCESS_KEY_ID``,
    ``AWS_SECRET_ACCESS_KEY``, ``AWS_REGION``, ``AWS_ENDPOINT_URL``.

    Args:
        url: ``s3://bucket/prefix``, ``gs://``, ``az://``, ``file:///directory``, ``memory:///``.
        options: For ``obstore.store.from_url``.
    """

    def __init__(self, url: str, **options: Any) -> None:
        try:
            import obstore
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ImportError as error:
            raise MissingExtra("durable", "obstore") from error
        self._error: type[Exception] = BaseError
        self._obstore: Any = obstore
        self.url = url
        try:
            made = {"mkdir": True} if url.startswith("file:") else {}
            self._store: Any = from_url(url, **made, **options)
        except (BaseError, ValueError) as error:
            raise StorageUnavailable(f"{url} cannot be used: {_first_line(error)}") from error

    def put(self, key: str, data: bytes) -> None:
        with self._worded():
            self._obstore.put(self._store, self._name(key), data)

    def get(self, key: str) -> bytes:
        with self._worded():
            try:
                return bytes(self._obstore.get(self._store, self._name(key)).bytes())
            except FileNotFoundError:
                raise _missing(key, self.url) from None

    def missing(self, keys: Iterable[str]) -> set[str]:
        wanted = list(keys)
        if len(wanted) == 1:
            return set() if self._has(wanted[0]) else set(wanted)
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            found = threads.map(self._has, wanted)
            return {key for key, is_there in zip(wanted, found, strict=True) if not is_there}

    def _has(self, key: str) -> bool:
        with self._worded():
            try:
                head = self._obstore.head(self._store, self._name(key))
            except FileNotFoundError:
                return False
        # To store it again makes it young: it may be about to be removed.
        return SYSTEM_CLOCK.time() - head["last_modified"].timestamp() < _YOUNG

    def ages(self) -> Iterator[tuple[str, float]]:
        now = SYSTEM_CLOCK.time()
        with self._worded():
            for batch in self._obstore.list(self._store):
                for each in batch:
                    key = str(each["path"]).replace("/", "")[-64:]
                    if _KEY.fullmatch(key):
                        yield key, now - each["last_modified"].timestamp()

    def remove(self, keys: Iterable[str]) -> None:
        with self._worded():
            for some in _batches(map(self._name, keys), 1000):
                with contextlib.suppress(FileNotFoundError):
                    self._obstore.delete(self._store, list(some))

    def _name(self, key: str) -> str:
        return f"{_checked(key)[:2]}/{key[2:]}"

    @contextlib.contextmanager
    def _worded(self) -> Generator[None]:
        try:
            yield
        except (self._error, OSError) as error:
            raise StorageUnavailable(f"objects in {self.url}: {_first_line(error)}") from error


_YOUNG = 5 * _DAY
"""Seconds after which an object of a bucket is stored again if it is needed again."""


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


_TABLE = """
    CREATE TABLE wink_objects (
        id TEXT PRIMARY KEY, data BYTEA NOT NULL, used DOUBLE PRECISION NOT NULL)
    """


class DatabaseObjects:
    """Objects in a table: nothing else to run, for workspaces that change little."""

    def __init__(self, database: Database) -> None:
        self._database = database
        prepare_tables(database, "objects", [[_TABLE]])

    def put(self, key: str, data: bytes) -> None:
        now = self._database.now
        self._database.execute(
            f"INSERT INTO wink_objects (id, data, used) VALUES (?, ?, {now})"
            f" ON CONFLICT (id) DO UPDATE SET used = {now}",
            _checked(key),
            data,
        )

    def get(self, key: str) -> bytes:
        sql = "SELECT data FROM wink_objects WHERE id = ?"
        rows = self._database.execute(sql, _checked(key))
        if not rows:
            raise _missing(key, self._database.shown)
        return bytes(rows[0][0])

    def missing(self, keys: Iterable[str]) -> set[str]:
        wanted = set(map(_checked, keys))

        def find(transaction: Transaction) -> set[str]:
            found: set[str] = set()
            for some in _batches(sorted(wanted), _IN_STATEMENT):
                where = f"WHERE id IN ({', '.join('?' * len(some))})"
                age = f"{transaction.now} - used"
                rows = transaction.execute(f"SELECT id, {age} FROM wink_objects {where}", *some)
                found.update(row[0] for row in rows)
                if any(row[1] > _NOTED for row in rows):
                    statement = f"UPDATE wink_objects SET used = {transaction.now} {where}"
                    transaction.execute(statement, *some)
            return found

        return wanted - self._database.repeat(find)

    def ages(self) -> Iterator[tuple[str, float]]:
        rows = self._database.execute(f"SELECT id, {self._database.now} - used FROM wink_objects")
        yield from ((str(key), float(age)) for key, age in rows)

    def remove(self, keys: Iterable[str]) -> None:
        rows = [[_checked(key)] for key in keys]
        if rows:
            self._database.repeat(
                lambda transaction: transaction.execute_many(
                    "DELETE FROM wink_objects WHERE id = ?", rows
                )
            )


_NOTED = 3600.0
"""Seconds after which the table notes that an object is in use."""


def _batches(values: Iterable[T], size: int) -> Iterator[list[T]]:
    left = iter(values)
    while some := list(islice(left, size)):
        yield some
