"""Going back over committed calls, without touching what someone else has changed since."""

from __future__ import annotations

import contextlib
import difflib
import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from weakincentives.filesystem.confined import Ident, Tree, ident_of
from weakincentives.filesystem.history import Delta, History
from weakincentives.filesystem.journal import Changes, matches
from weakincentives.filesystem.layers import Look
from weakincentives.filesystem.protocol import Parts, join_path, shown
from weakincentives.filesystem.records import Record
from weakincentives.filesystem.store import Entry, apply_entry, copy_content

__all__ = ["describe", "go_back"]

_REPLACING = ("put", "gone", "edit", "found", "attributes")


def go_back(changes: Changes, history: History, serial: int) -> tuple[str, ...]:
    """Undo all that was committed after a place, as changes of an open transaction.

    Returns a sentence for each thing that was left alone.
    """
    going = _Going(changes, history)
    for later in history.after(serial):
        going.undo(history.read(later))
    going.set_times()
    return tuple(going.sentences)


class _Going:
    """What is known on the way back."""

    def __init__(self, changes: Changes, history: History) -> None:
        self.changes = changes
        self.history = history
        self.sentences: list[str] = []
        self._state: dict[Parts, Ident | None] = {}
        """What the history says is at the paths that were put back."""
        self._left: set[Parts] = set()
        self._times: dict[Parts, int] = {}
        self._linked: dict[int, Parts] = {}
        """Files with several names that were put back, by their former inode."""

    def undo(self, delta: Delta) -> None:
        """Undo one committed call, as far as things are as it left them."""
        changes = [r for r in reversed(delta.records) if r.op not in ("external", "again")]
        checked: set[Parts] = set()
        # All before the first is undone: one name of a file is changed by way of another.
        for record in changes:
            for parts in _paths(record):
                if parts not in checked and not self._is_left(record):
                    if not self._is_as_left(parts, delta):
                        self._leave(parts, record, delta)
                    checked.add(parts)
        for record in changes:
            if not self._is_left(record):
                self._undo(record, delta)

    def _is_left(self, record: Record) -> bool:
        return any(
            parts[:depth] in self._left
            for parts in _paths(record)
            for depth in range(len(parts) + 1)
        )

    def _is_as_left(self, parts: Parts, delta: Delta) -> bool:
        """Tell whether what is at a path is what the call left there."""
        if parts not in delta.after:
            return True
        if parts in self._state:
            now = self._state[parts]
        else:
            try:
                status = self.changes.tree.status(parts)
            except OSError:
                return False  # something else is in the way
            now = None if status is None else ident_of(status)
        return matches(delta.after[parts], now)

    def _leave(self, parts: Parts, record: Record, delta: Delta) -> None:
        self._left.add(parts)
        kept = ""
        if record.before is not None and parts == record.path:
            place = self.changes.store.left(parts)
            folder = Tree(place.parent)
            try:
                self._make(record, record.before, folder, place.name, delta)
            except OSError:
                pass
            else:
                kept = f"; what was there before is in {place}"
            finally:
                folder.close()
        self.sentences.append(
            f"{shown(join_path(parts))} was changed by someone else since, and is left as it is"
            f"{kept}"
        )

    def _undo(self, record: Record, delta: Delta) -> None:
        before = record.before
        match record.op:
            case "moved" | "moved over" if record.origin is not None:
                self.changes.rename(record.path, record.origin)
                self._state[record.origin] = record.old
                self._state[record.path] = None
            case "made":
                self._unmake(record)
            case "attributes" if before is not None:
                self._set_attributes(record.path, before)
            case "put" | "gone" | "edit" | "found":
                self._put_back(record, delta)
            case _:
                pass
        for parts, mtime in record.times:
            self._times[parts] = mtime

    def _unmake(self, record: Record) -> None:
        if self.changes.tree.status(record.path) is None:
            return
        if self.changes.tree.names(record.path):
            self._left.add(record.path)
            self.sentences.append(
                f"{shown(join_path(record.path))} holds something that is not from these calls,"
                " and is left as it is"
            )
            return
        self.changes.remove(record.path)
        self._forget_times(record.path)
        self._state[record.path] = None

    def _put_back(self, record: Record, delta: Delta) -> None:
        before, parts, tree = record.before, record.path, self.changes.tree
        status = tree.status(parts)
        if before is None:
            if status is not None:
                self._remove(parts)
            self._state[parts] = None
            return
        if before.kind == "directory" and record.op == "found":
            if status is not None and not stat.S_ISDIR(status.st_mode):
                self.changes.remove(parts)
                status = None
            if status is None:
                self.changes.make_directory(parts)
            self._set_attributes(parts, before)
        elif before.kind == "file" and status is not None and self._is_same(parts, status, before):
            self.changes.write(parts, self.changes.store.objects.read(before.digest or ""))
            self._set_attributes(parts, before)
            self._linked[before.ino] = parts
        elif before.kind == "file" and (other := self._other_name(parts, before)) is not None:
            self._link(parts, other)
        else:
            staged = self.changes.store.stage()
            try:
                self._make(record, before, self.changes.store.tree, staged.name, delta)
            except FileNotFoundError:
                self._left.add(parts)
                self.sentences.append(
                    f"{shown(join_path(parts))} could not be put back: its content was not kept"
                )
                return
            self.changes.put(parts, staged)
            self._forget_times(parts)
            if before.nlink > 1:
                self._linked[before.ino] = parts
        self._state[parts] = before.ident

    def _is_same(self, parts: Parts, status: os.stat_result, before: Entry) -> bool:
        """Tell whether a file is the one it was, or stands for it since it was put back."""
        return _is_same_file(status, before) or self._linked.get(before.ino) == parts

    def _other_name(self, parts: Parts, before: Entry) -> Parts | None:
        """Return another name of a file that had several; it may have one nobody touched."""
        if before.nlink < 2:
            return None
        known = self._linked.get(before.ino)
        if known is not None:
            return None if known == parts else known
        for place, status in self.changes.tree.walk(()):
            if ident_of(status) == before.ident and place != parts:
                self._linked[before.ino] = place
                return place
        return None

    def _remove(self, parts: Parts) -> None:
        try:
            self.changes.remove(parts)
        except PermissionError:
            # The call closed the directory to writing; that is undone next.
            self.changes.set_attributes(parts[:-1], mode=0o700)
            self.changes.remove(parts)

    def _link(self, parts: Parts, other: Parts) -> None:
        """Make a path one more name of a file."""
        staged = self.changes.store.stage()
        with self.changes.tree.parent(other) as above:
            os.link(other[-1], staged, src_dir_fd=above, follow_symlinks=False)
        self.changes.put(parts, staged)

    def _forget_times(self, parts: Parts) -> None:
        """Leave the times of a directory alone that is another one now."""
        self._times = {
            known: mtime for known, mtime in self._times.items() if known[: len(parts)] != parts
        }

    def _make(self, record: Record, before: Entry, tree: Tree, name: str, delta: Delta) -> None:
        """Make again what a call has replaced, at a free name."""
        match before.kind:
            case "file" if before.digest is not None:
                reading = self.changes.store.objects.open(before.digest)
                try:
                    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                    writing = os.open(name, flags, 0o600, dir_fd=tree.fd)
                    try:
                        copy_content(reading, writing)
                    finally:
                        os.close(writing)
                finally:
                    os.close(reading)
            case "symlink":
                os.symlink(before.target or "", name, dir_fd=tree.fd)
            case "fifo":
                os.mkfifo(name, 0o600, dir_fd=tree.fd)
            case "directory" if record.kept is not None:
                self.history.copy_tree(delta.committed.serial, record.kept, tree, name)
                return
            case _:
                raise FileNotFoundError(name)
        apply_entry(tree, (name,), before)

    def _set_attributes(self, parts: Parts, before: Entry) -> None:
        if self.changes.tree.status(parts) is not None:
            self.changes.set_attributes(
                parts,
                mode=before.mode,
                mtime_ns=before.mtime_ns,
                uid=before.uid,
                gid=before.gid,
                xattrs=before.xattrs,
            )

    def set_times(self) -> None:
        """Give directories the times they had, now that nothing changes in them any more."""
        for parts, mtime in self._times.items():
            with contextlib.suppress(OSError):  # not there, or not a directory any more
                status = self.changes.tree.status(parts)
                if status is not None and stat.S_ISDIR(status.st_mode):
                    self.changes.set_attributes(parts, mtime_ns=mtime)


def _paths(record: Record) -> tuple[Parts, ...]:
    return (record.path,) if record.origin is None else (record.path, record.origin)


def _is_same_file(status: os.stat_result, before: Entry) -> bool:
    return (
        status.st_ino == before.ino
        and before.nlink > 1
        and stat.S_ISREG(status.st_mode)
        and before.digest is not None
    )


class _Side(NamedTuple):
    """A file before or after a call."""

    data: bytes | None
    """None for nothing, and for what is not a file."""
    words: str


def describe(history: History, serial: int, now: Look) -> str:
    """Return what a call changed, as a unified diff."""
    delta = history.read(serial)
    later = [history.read(other) for other in sorted(history.after(serial))]
    seen: set[Parts] = set()
    lines: list[str] = []
    for record in delta.records:
        if record.origin is not None:
            old, new = shown(join_path(record.origin)), shown(join_path(record.path))
            lines.append(f"renamed {old} to {new}")
        elif record.op == "made":
            lines.append(f"new directory {shown(join_path(record.path))}")
        elif record.op in _REPLACING and record.path not in seen:
            seen.add(record.path)
            before = _before(history, record)
            lines += _compared(record.path, before, _after(history, later, record.path, now))
    return "\n".join(lines)


def _before(history: History, record: Record) -> _Side:
    entry = record.before
    if entry is None:
        return _Side(None, "nothing")
    if entry.kind != "file":
        return _Side(None, f"a {entry.kind}")
    if entry.digest is None or entry.digest not in history.store.objects:
        return _Side(None, "a file that was not kept")
    return _Side(history.store.objects.read(entry.digest), "a file")


def _after(history: History, later: list[Delta], parts: Parts, now: Look) -> _Side:
    """Return what a call left at a path: what the next one to change it found, or what is there."""
    for delta in later:
        for record in delta.records:
            if record.path == parts and record.op in ("put", "gone", "edit", "found"):
                return _before(history, record)
    try:
        node = now.node(parts)
        if node is None:
            return _Side(None, "nothing")
        return _Side(now.read(parts) if node.kind == "file" else None, f"a {node.kind}")
    except OSError:
        return _Side(None, "something that cannot be read")


def _compared(parts: Parts, before: _Side, after: _Side) -> Iterator[str]:
    path = shown(join_path(parts))
    old, new = before.data, after.data
    if (old is None and before.words != "nothing") or (new is None and after.words != "nothing"):
        yield f"{path}: {before.words} became {after.words}"
        return
    try:
        old_text = "" if old is None else old.decode()
        new_text = "" if new is None else new.decode()
    except UnicodeDecodeError:
        yield f"{path}: binary, {len(old or b'')} bytes became {len(new or b'')}"
        return
    yield from difflib.unified_diff(
        old_text.splitlines(),
        new_text.splitlines(),
        "/dev/null" if old is None else f"a/{path}",
        "/dev/null" if new is None else f"b/{path}",
        lineterm="",
    )
