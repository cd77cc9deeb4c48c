"""Looks through a workspace and remembers what each file told, so that only changes are read."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from weakincentives.contrib.tools.digest_facts import (
    FileFacts,
    facts_of,
    is_manifest,
    language_of,
)
from weakincentives.contrib.tools.gitignore import IgnoreRules, is_ignored, parse_ignore_file
from weakincentives.errors import FilesystemError
from weakincentives.filesystem import FileStat, Filesystem

__all__ = ["DigestConfig", "Found", "Survey"]

_Key = tuple[int, float]
"""Size and time of a file: while they are the same, so is what it told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestConfig:
    """How much of a workspace is looked at, and how much of it is shown."""

    max_files: int = 20_000
    """Files and directories that are looked at; what is further down is left out then."""
    max_file_bytes: int = 200_000
    """Larger files are not read."""
    max_reads: int = 2_000
    """Files read for one rendering; the next one goes on from there."""
    gitignore: bool = True
    """Leave out what the ``.gitignore`` files leave out."""
    skip: tuple[str, ...] = (".git", ".hg", ".svn")
    """Names that are left out wherever they are."""
    big_file_bytes: int = 200_000
    """From this size on a file is named as a big one."""
    lines: int = 20
    """Lines of each part that are shown."""

    def __post_init__(self) -> None:
        for name in ("max_files", "max_file_bytes", "max_reads", "big_file_bytes", "lines"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(slots=True)
class Found:
    """What one look through a workspace has found."""

    files: list[tuple[FileStat, FileFacts | None]] = field(
        default_factory=list[tuple[FileStat, "FileFacts | None"]]
    )
    """Nearest to the root first; without facts where it was not read."""
    directories: int = 0
    unread: int = 0
    """Files that are still to be read."""
    is_cut: bool = False
    """Whether there are more files than are looked at."""


@dataclass(frozen=True, slots=True)
class _Listing:
    """A directory as it was listed, and what of it counts."""

    entries: tuple[FileStat, ...]
    rules: tuple[IgnoreRules, ...]
    files: tuple[FileStat, ...]
    directories: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.files) + len(self.directories)


class Survey:
    """What is known of a workspace; ``look`` brings it up to date."""

    def __init__(self, config: DigestConfig) -> None:
        self._config = config
        self._facts: dict[str, tuple[_Key, FileFacts]] = {}
        self._rules: dict[str, tuple[_Key, IgnoreRules]] = {}
        self._listings: dict[str, _Listing] = {}
        self._found: Found | None = None
        self._lock = threading.Lock()  # several sessions may render one section

    def look(self, fs: Filesystem) -> Found:
        """Return what is there now: the very same as last time where nothing has changed.

        All directories are listed; only files that changed are read.
        """
        with self._lock:
            listings = dict(self._walk(fs))
            was, self._listings = self._listings, listings
            found = self._found
            is_same = len(was) == len(listings) and all(
                was.get(path) is listing for path, listing in listings.items()
            )
            if found is None or found.unread or not is_same:
                found = self._found = self._read_changed(fs, listings)
            return found

    def fingerprint(self, fs: Filesystem, path: str, found: Found) -> str:
        """Return what changes with the content of a file, or with anything that was found in a
        directory; empty when there is nothing at the path.
        """
        path = fs.normalize(path)
        try:
            entry = fs.stat(path)
        except FilesystemError:
            return ""
        if entry.kind == "directory":
            inside = "" if path == "." else f"{path}/"
            listed = (_line(each) for each, _ in found.files if each.path.startswith(inside))
            return _hash("\n".join(listed))
        if entry.size > self._config.max_file_bytes:
            return _hash(_line(entry))
        facts = self._known(entry) or self._read(fs, entry)
        return "" if facts is None else facts.digest

    def _walk(self, fs: Filesystem) -> Iterator[tuple[str, _Listing]]:
        """Yield what each directory holds, nearest to the root first."""
        pending: deque[tuple[str, tuple[IgnoreRules, ...]]] = deque([(".", ())])
        count = 0
        while pending and count <= self._config.max_files:
            directory, rules = pending.popleft()
            try:
                entries = fs.list(directory)
            except FilesystemError:
                continue  # gone meanwhile, or not to be looked into
            rules = (*rules, *self._ignore_rules(fs, directory, entries))
            listing = self._listings.get(directory)
            if listing is None or listing.entries != entries or listing.rules != rules:
                listing = self._listing(fs, entries, rules)
            count += listing.size
            pending.extend((path, rules) for path in listing.directories)
            yield directory, listing

    def _listing(
        self, fs: Filesystem, entries: tuple[FileStat, ...], rules: tuple[IgnoreRules, ...]
    ) -> _Listing:
        """Return what of a directory's entries counts."""
        files: list[FileStat] = []
        directories: list[str] = []
        for entry in entries:
            is_directory = entry.kind == "directory"
            is_skipped = entry.path.rpartition("/")[2] in self._config.skip
            if is_skipped or is_ignored(entry.path, is_directory, rules):
                continue
            if entry.kind == "file":
                files.append(entry)
            elif is_directory and not _is_link(fs, entry.path):
                directories.append(entry.path)
        return _Listing(entries, rules, tuple(files), tuple(directories))

    def _read_changed(self, fs: Filesystem, listings: Mapping[str, _Listing]) -> Found:
        entries = [entry for listing in listings.values() for entry in listing.files]
        most = self._config.max_files
        is_cut = sum(listing.size for listing in listings.values()) > most
        found = Found(directories=len(listings) - 1, is_cut=is_cut)
        del entries[most:]
        present = {entry.path for entry in entries}
        self._facts = {path: kept for path, kept in self._facts.items() if path in present}
        left = self._config.max_reads
        # What says how the project is made comes first; the sort keeps the order otherwise.
        for entry in sorted(entries, key=lambda entry: not is_manifest(entry.path)):
            if not self._is_worth_reading(entry) or self._known(entry) is not None:
                continue
            if left > 0:
                self._read(fs, entry)
            else:
                found.unread += 1
            left -= 1
        found.files = [(entry, self._known(entry)) for entry in entries]
        return found

    def _ignore_rules(
        self, fs: Filesystem, directory: str, entries: Iterable[FileStat]
    ) -> Iterator[IgnoreRules]:
        if not self._config.gitignore:
            return
        for entry in entries:
            is_rules = entry.path.rpartition("/")[2] == ".gitignore" and entry.kind == "file"
            if not is_rules or entry.size > self._config.max_file_bytes:
                continue
            kept = self._rules.get(entry.path)
            if kept is None or kept[0] != _key(entry):
                data = _content(fs, entry.path)
                text = "" if data is None else data.decode(errors="replace")
                kept = self._rules[entry.path] = _key(entry), parse_ignore_file(text, directory)
            yield kept[1]

    def _is_worth_reading(self, entry: FileStat) -> bool:
        if entry.size > self._config.max_file_bytes:
            return False
        return language_of(entry.path) is not None or is_manifest(entry.path)

    def _known(self, entry: FileStat) -> FileFacts | None:
        key, facts = self._facts.get(entry.path, (None, None))
        return facts if key == _key(entry) else None

    def _read(self, fs: Filesystem, entry: FileStat) -> FileFacts | None:
        data = _content(fs, entry.path)
        if data is None:
            return None
        facts = facts_of(entry.path, data)
        self._facts[entry.path] = _key(entry), facts
        return facts


def _key(entry: FileStat) -> _Key:
    return entry.size, entry.modified


def _line(entry: FileStat) -> str:
    return f"{entry.path} {entry.size} {entry.modified}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


def _content(fs: Filesystem, path: str) -> bytes | None:
    try:
        return fs.read_bytes(path)
    except FilesystemError:  # gone meanwhile
        return None


def _is_link(fs: Filesystem, path: str) -> bool:
    # A listing shows a link to a directory as a directory, and one may lead back to itself.
    root = getattr(fs, "root", None)
    return isinstance(root, Path) and (root / path).is_symlink()
