"""Contents on their way to object storage and back, in objects of at most 4 MB.

Small contents travel together: thousands of files are a few objects. A large file is several. The
key of an object is the SHA-256 digest of its bytes, so storage needs no trust: whatever it returns
is checked. An object begins with a byte that says whether the rest is compressed.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar

from weakincentives.errors import ContentDamaged, HistoryDamaged
from weakincentives.filesystem.entry import checked_digest
from weakincentives.filesystem.store import DAMAGED, Objects, read_exactly
from weakincentives.filesystem.tree import Held, write_all

T = TypeVar("T")

OBJECT_SIZE = 4 << 20
"""Bytes of content in an object, before compression."""
_SMALL = 512 << 10
"""Bytes; a smaller content shares an object with others."""
_PLAIN, _COMPRESSED = b"\0", b"\1"
_WORTH = 0.9
"""Content that does not become smaller than this is stored as it is."""
_AT_ONCE = 4
"""Objects that are fetched at once: so up to 40 MB are in memory."""


class ObjectStorage(Protocol):
    """Where objects are kept, by the digests of their bytes. Any thread may use it."""

    def put(self, key: str, data: bytes) -> None:
        """Store an object; to store it again changes nothing.

        Raises:
            StorageUnavailable: It is not stored.
        """
        ...

    def get(self, key: str) -> bytes:
        """Return an object; the caller checks its bytes.

        Raises:
            ObjectMissing: There is none.
            StorageUnavailable: It cannot be read now.
        """
        ...

    def missing(self, keys: Iterable[str]) -> set[str]:
        """Return those that are not stored."""
        ...


class Piece(NamedTuple):
    """A part of a content: where it is, in which object."""

    key: str
    offset: int
    size: int


Pieces = tuple[Piece, ...]


def decoded_pieces(values: Sequence[Any]) -> Pieces:
    """Return pieces from JSON values; raises ValueError if they are malformed."""
    found: list[Piece] = []
    for key, offset, size in values:
        if type(offset) is not int or type(size) is not int or min(offset, size) < 0:
            raise ValueError(f"malformed piece: {offset!r}, {size!r}")
        found.append(Piece(checked_digest(key), offset, size))
    return tuple(found)


class Packer:
    """Gathers contents into objects and stores them."""

    def __init__(self, storage: ObjectStorage) -> None:
        self._storage = storage
        self._buffer = bytearray()
        self._name = "+0"
        """Stands for the key of the object which is being filled."""
        self._keys: dict[str, str] = {}

    def add(self, reading: int) -> tuple[str, list[Piece]]:
        """Add the rest of an open file; returns its digest, and pieces for :meth:`placed`."""
        hashed, pieces = hashlib.sha256(), list[Piece]()
        while data := read_exactly(reading, OBJECT_SIZE):
            hashed.update(data)
            is_small = not pieces and len(data) < _SMALL
            pieces.append(self._add_small(data) if is_small else self.add_alone(data))
        return hashed.hexdigest(), pieces

    def add_alone(self, data: bytes) -> Piece:
        """Store at most ``OBJECT_SIZE`` bytes in an object of their own."""
        return Piece(self._store(data), 0, len(data))

    def _add_small(self, data: bytes) -> Piece:
        if len(self._buffer) + len(data) > OBJECT_SIZE:
            self.flush()
        piece = Piece(self._name, len(self._buffer), len(data))
        self._buffer += data
        return piece

    def flush(self) -> None:
        """Store what was added and is not stored yet."""
        if self._buffer:
            self._keys[self._name] = self._store(bytes(self._buffer))
            self._name = f"+{len(self._keys)}"
            self._buffer.clear()

    def placed(self, pieces: Iterable[Piece]) -> Pieces:
        """Return where a content is; only after :meth:`flush`."""
        return tuple(each._replace(key=self._keys.get(each.key, each.key)) for each in pieces)

    def _store(self, data: bytes) -> str:
        packed = zlib.compress(data, 1)
        is_smaller = len(packed) < _WORTH * len(data)
        stored = _COMPRESSED + packed if is_smaller else _PLAIN + data
        key = hashlib.sha256(stored).hexdigest()
        if self._storage.missing([key]):
            self._storage.put(key, stored)
        return key


def fetch_object(storage: ObjectStorage, key: str) -> bytes:
    """Return what an object holds.

    Raises:
        ContentDamaged: Storage returned something else.
    """
    stored = storage.get(key)
    if hashlib.sha256(stored).hexdigest() != key:
        raise _damaged(key)
    if stored[:1] == _PLAIN:
        return stored[1:]
    try:
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(stored[1:], OBJECT_SIZE)
    except zlib.error:
        raise _damaged(key) from None
    if stored[:1] != _COMPRESSED or not unpacking.eof:
        raise _damaged(key)  # also one that would fill the memory
    return data


def _damaged(key: str) -> ContentDamaged:
    return ContentDamaged(DAMAGED, "stored content is damaged", f"the stored object {key}")


def fetch_contents(
    storage: ObjectStorage,
    wanted: Mapping[T, Pieces],
    use: Callable[[T, Iterator[bytes]], object],
) -> None:
    """Give each content to ``use``, in pieces, in several threads; each object is read once.

    Raises:
        ObjectMissing: Storage does not have an object.
        ContentDamaged: Storage returned something else.
    """
    groups: dict[str, list[T]] = {}
    for name, pieces in wanted.items():
        groups.setdefault(pieces[0].key if pieces else "", []).append(name)

    def fetch(key: str) -> None:
        first = fetch_object(storage, key) if key else b""
        for name in groups[key]:
            use(name, _chunks(storage, wanted[name], first))

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        under_way = [threads.submit(fetch, key) for key in groups]
        try:
            for each in under_way:
                each.result()
        except BaseException:
            threads.shutdown(wait=True, cancel_futures=True)
            raise


def _chunks(storage: ObjectStorage, pieces: Pieces, first: bytes) -> Iterator[bytes]:
    for number, piece in enumerate(pieces):
        data = fetch_object(storage, piece.key) if number else first
        if piece.offset + piece.size > len(data):
            raise HistoryDamaged(f"a content is outside of the stored object {piece.key}")
        yield data[piece.offset : piece.offset + piece.size]


def upload_contents(packer: Packer, contents: Objects, digests: Iterable[str]) -> dict[str, Pieces]:
    """Store contents; returns where they are."""
    found: dict[str, list[Piece]] = {}
    for digest in sorted(digests):
        with Held(contents.open(digest)) as fd:
            found[digest] = packer.add(fd)[1]
    packer.flush()
    return {digest: packer.placed(pieces) for digest, pieces in found.items()}


def zero_fill(fd: int, chunks: Iterable[bytes]) -> str:
    """Write content to an empty file, with holes where it is zero; returns its digest."""
    hashed, size = hashlib.sha256(), 0
    for data in chunks:
        hashed.update(data)
        size += len(data)
        if len(data) >= _SMALL and data.count(0) == len(data):
            os.lseek(fd, len(data), os.SEEK_CUR)
        else:
            write_all(fd, data)
    if os.fstat(fd).st_size != size:
        os.ftruncate(fd, size)
    return hashed.hexdigest()
