"""What the operations of a workspace name: contents of files, and what is in directories."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from weakincentives.filesystem.entry import Entry as Found
from weakincentives.filesystem.entry import (
    apply_entry,
    copy_content,
    copy_exactly,
    create,
    digest_of,
    link,
    new_file,
)
from weakincentives.filesystem.operations import stat_of, value_of
from weakincentives.filesystem.paths import Parts
from weakincentives.filesystem.store import Objects, checked_parts
from weakincentives.filesystem.tree import Held, Tree, write_all
from weakincentives.log import Entry, Log, Stat, read_manifest

Listed = Mapping[Parts, tuple[Entry, Stat | None]]


class Contents:
    """Reads what ``Entry.content`` names, wherever that is kept."""

    def __init__(self, store: Path, log: Log) -> None:
        self._objects = Objects(store / "objects")
        self._store = store
        self._log = log
        self._listed: dict[str, Listed] = {}
        self._digests: dict[str, str | None] = {}

    @cached_property
    def _tree(self) -> Tree:
        return Tree(self._store)

    def read(self, content: str) -> bytes:
        """Return the content of a file.

        Raises:
            FileNotFoundError: It was not stored.
            HistoryDamaged: It is not what was stored.
        """
        if not content:
            raise FileNotFoundError(errno.ENOENT, "its content was not saved")
        if content.startswith("@"):
            return self._tree.read(self._kept(content))[0]
        try:
            return self._log.content(content)
        except LookupError:
            return self._objects.read(content)

    def manifest(self, content: str) -> Mapping[Parts, Entry]:
        """Return what is in a directory: what the functions over operations ask for."""
        return {path: entry for path, (entry, _) in self.listed(content).items()}

    def listed(self, content: str) -> Listed:
        """Return what is in a directory, and what each entry is recognised by.

        That is nothing for one whose entries have changes of their own.
        """
        if not content:
            return {}
        if content not in self._listed:
            is_kept = content.startswith("@")
            found = self._walked(content) if is_kept else read_manifest(self.read(content))
            self._listed[content] = found
        return self._listed[content]

    def _walked(self, content: str) -> Listed:
        top = self._kept(content)
        found: dict[Parts, tuple[Entry, Stat | None]] = {}
        for path, status in self._tree.walk(top, lenient=True):
            inner = path[len(top) :]
            entry = Found.of(status)
            if entry.kind == "link":
                entry = entry._replace(target=self._tree.link_target(path))
            value = value_of(entry)
            if entry.kind == "file":
                value = value._replace(content="/".join((content, *inner)))
            if inner:
                found[inner] = value, stat_of(entry)
        return found

    def place(self, content: str) -> tuple[Tree, Parts]:
        """Return where a removed directory, or something in one, is kept."""
        return self._tree, self._kept(content)

    def _kept(self, content: str) -> Parts:
        return (KEPT, *checked_parts(content[1:]))

    # Making again

    def make(self, value: Entry, tree: Tree, name: str) -> None:
        """Create what an entry says, with what is in it, at a free name.

        Raises:
            FileNotFoundError: Its content was not stored.
        """
        if value.kind == "file":
            self._make_file(value, tree, (name,))
        elif value.is_directory and value.content.startswith("@"):
            parts = self._kept(value.content)
            status = self._tree.status_if_reached(parts)
            if status is None or not stat.S_ISDIR(status.st_mode):  # a planted link, for example
                raise FileNotFoundError(errno.ENOENT, "it is no longer kept", name)
            copy_exactly(self._tree, parts, tree, (name,))
        elif value.is_directory:
            self._make_directory(value, tree, (name,))
        else:
            entry = found_of(value)
            if not create(tree.fd, name, entry):
                raise FileNotFoundError(errno.ENOENT, "it cannot be made again", name)
            apply_entry(tree, (name,), entry)

    def _make_directory(self, value: Entry, tree: Tree, top: Parts) -> None:
        directories: list[tuple[Parts, Entry]] = [(top, value)]
        listed = self.listed(value.content)
        names: dict[int, Parts] = {}
        with tree.parent(top) as above:
            os.mkdir(top[-1], 0o700, dir_fd=above)
        for inner in sorted(listed):
            entry, parts = listed[inner][0], (*top, *inner)
            if entry.group in names:
                with tree.parent(names[entry.group]) as other, tree.parent(parts) as above:
                    link(other, names[entry.group][-1], above, parts[-1])
                continue
            if entry.kind == "file":
                self._make_file(entry, tree, parts)
            else:
                with tree.parent(parts) as above:
                    if not create(above, parts[-1], found_of(entry)):
                        continue
                if entry.is_directory:
                    directories.append((parts, entry))
                else:
                    apply_entry(tree, parts, found_of(entry))
            if entry.group:
                names[entry.group] = parts
        for parts, entry in reversed(directories):
            apply_entry(tree, parts, found_of(entry))

    def _make_file(self, value: Entry, tree: Tree, parts: Parts) -> None:
        with tree.parent(parts) as above, new_file(above, parts[-1]) as writing:
            try:
                self._fill(value.content, writing)
            except BaseException:
                os.unlink(parts[-1], dir_fd=above)
                raise
        apply_entry(tree, parts, found_of(value))

    def _fill(self, content: str, writing: int) -> None:
        data = self._row(content)
        if data is not None:
            write_all(writing, data)
            return
        with Held(self._open(content)) as reading:
            copy_content(reading, writing)

    def _row(self, content: str) -> bytes | None:
        """Return a small content; None for one that is a file."""
        if content and not content.startswith("@"):
            with contextlib.suppress(LookupError):
                return self._log.content(content)
        return None

    def _open(self, content: str) -> int:
        if not content:
            raise FileNotFoundError(errno.ENOENT, "its content was not saved")
        if not content.startswith("@"):
            return self._objects.open(content)
        return self._tree.open_file(self._kept(content))

    def has(self, content: str) -> bool:
        """Tell whether a content is stored."""
        if content.startswith("@"):
            return self._tree.status_if_reached(self._kept(content)) is not None
        return content in self._objects or self._row(content) is not None

    def digest(self, content: str) -> str | None:
        """Return the SHA-256 of a file's content; None if it is not known."""
        if not content.startswith("@"):
            return content or None
        if content not in self._digests:
            self._digests[content] = None
            with contextlib.suppress(OSError), Held(self._open(content)) as fd:
                self._digests[content] = digest_of(fd)
        return self._digests[content]


def found_of(value: Entry) -> Found:
    """Return what the log has stored as an entry of the directory."""
    is_digest = value.kind == "file" and not value.content.startswith("@")
    return Found(
        "other" if value.kind == "pipe" else value.kind,
        value.mode,
        len(os.fsencode(value.content)) if value.kind == "link" else value.size,
        value.mtime_ns,
        uid=value.uid,
        gid=value.gid,
        xattrs=value.xattrs,
        target=value.content if value.kind == "link" else None,
        digest=(value.content or None) if is_digest else None,
        pipe=value.kind == "pipe",
    )


def node_of(value: Entry | None, stat: Stat | None) -> Found | None:
    """Return an entry with what it is recognised by."""
    if value is None:
        return None
    node = found_of(value)
    if stat is None:
        return node
    return node._replace(
        ino=stat.inode, device=stat.device, links=stat.links, ctime_ns=stat.ctime_ns
    )


KEPT = "kept"
"""The folder with what operations displaced as a whole, by their ids."""
