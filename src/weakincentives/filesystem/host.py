"""A filesystem over a real directory: every call's changes can be kept, or undone exactly."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import stat
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Concatenate, Literal, ParamSpec, TypeVar

from weakincentives.call import ToolCall, call_under_way, current_view
from weakincentives.clock import SYSTEM_CLOCK, Clock
from weakincentives.errors import (
    AlreadyExists,
    FilesystemError,
    MergeConflict,
    ProtectedPath,
    ReadOnlyView,
    SnapshotExpired,
    ViewClosed,
    WinkError,
)
from weakincentives.filesystem.changes import Changes, recover
from weakincentives.filesystem.commands import (
    DEFAULT_OUTPUT_LIMIT,
    Command,
    CommandResult,
    Commands,
    Watch,
    apply_steps,
    run_over,
    run_plainly,
)
from weakincentives.filesystem.confined import BARRED, Tree, escapes, resolve, supported
from weakincentives.filesystem.diffs import FileChange, changed_paths, file_changes
from weakincentives.filesystem.history import (
    DEFAULT_LIMIT,
    Committed,
    History,
    replaced,
)
from weakincentives.filesystem.journal import Record
from weakincentives.filesystem.layers import (
    Changed,
    Disk,
    File,
    Layer,
    Look,
    Node,
    Present,
    Taken,
    names_of,
    taken_by,
    undone,
    walk,
)
from weakincentives.filesystem.overlay import Layers, Step
from weakincentives.filesystem.patterns import (
    GlobPattern,
    PathPatterns,
    check_limit,
    compile_regex,
    matching_lines,
)
from weakincentives.filesystem.protocol import (
    DEFAULT_ROOT,
    FileStat,
    GrepMatch,
    Parts,
    decode_text,
    directory_not_file,
    encode_text,
    file_not_directory,
    join_path,
    nothing_there,
    read_only,
    shown,
    split_path,
    split_root,
)
from weakincentives.filesystem.reserved import Hiding, Reserved
from weakincentives.filesystem.scan import External
from weakincentives.filesystem.scratch import TEMPORARY
from weakincentives.filesystem.seen import Seen, check_open, conflict
from weakincentives.filesystem.staging import Staging, State
from weakincentives.filesystem.store import Store
from weakincentives.filesystem.undo import diff_of, go_back, take_back
from weakincentives.interrupts import undisturbed

__all__ = ["HostFilesystem"]

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("weakincentives.filesystem")

# What a change fails with when the way to it is not as it was.
_NOT_AS_IT_WAS = BARRED | {errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR}

RETRIES = 10
"""How often a path is looked up again when links on it come and go."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Place:
    """A snapshot of the workspace itself: a place in the sequence of what was committed."""

    serial: int
    workspace: _Workspace
    expired: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Mark:
    """A savepoint in a call that works in place."""

    changes: Changes
    mark: int


@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    """The state of a private view."""

    staging: Staging
    state: State
    place: _Place | None
    """What it was forked from; None for a view within a view."""


class _Workspace:
    """What a filesystem and all its views have in common."""

    def __init__(
        self,
        root: Path,
        *,
        store: Path | None,
        safe: bool,
        wait: float,
        limit: int,
        clock: Clock,
        unprotected: Sequence[str],
    ) -> None:
        with contextlib.ExitStack() as opened:
            self.store = Store(root, path=store, wait=wait, safe=safe)
            opened.callback(self.store.close)
            self.tree = Tree(root)
            opened.callback(self.tree.close)
            self.external = External(self.tree, self.store)
            self.commands = Commands(self.store)
            self.reserved = Reserved(self.tree.path, store=self.store.path, unprotected=unprotected)
            opened.pop_all()
        self.closing = weakref.finalize(
            self, _close, self.store, self.tree, self.external, self.commands
        )
        self.lock = threading.RLock()
        self.gate = threading.Lock()
        self.history = History(self.store, limit=limit, clock=clock)
        self.places: weakref.WeakSet[_Place] = weakref.WeakSet()
        # Not a method of this object: one that is forgotten is to let go of its lock at once.
        self.history.needed = functools.partial(_oldest, self.places)
        self.private: weakref.WeakSet[HostFilesystem] = weakref.WeakSet()
        self.in_place: Changes | None = None
        self.in_place_thread = 0
        self.disk: Look = Disk(self.tree)
        if self.reserved.hidden:
            self.disk = Hiding(self.disk, self.reserved.hidden)
        self.present = Present(self.disk)
        self.links: dict[Sequence[str], frozenset[Parts]] = {}
        """What links at protected paths lead to, by the patterns."""
        self._stages: list[tuple[int, Present]] = []
        """What was the present in the call that works in place, by how many changes it had made."""
        self.recovered = recover(self.tree, self.history)

    def place(self) -> _Place:
        """Return the present place in the sequence of what was committed."""
        place = _Place(self.history.last, self)
        self.places.add(place)
        return place

    def at(self, place: _Place) -> Look:
        """Return how things were at a place."""
        look: Look = self.present
        for serial in self.history.after(place.serial):
            delta = self.history.read(serial)
            look = undone(Layer(look), delta.records, taken_by(self.history, delta))
        return look

    def committed(self, serial: int | None) -> None:
        """Let the private views go on seeing what was there when they were forked."""
        if serial is None or not self.private:
            return
        delta = self.history.read(serial)
        self.present = self.present.supersede(delta.records, taken_by(self.history, delta))

    # Private views beside a call that works in place, and of one

    def begin_in_place(self) -> Changes:
        """Open the one transaction that works in place."""
        self.in_place = Changes(self.tree, self.history)
        self.in_place_thread = threading.get_ident()
        self._stages = [(0, self.present)]
        return self.in_place

    def forked(self) -> Present:
        """Return what a view is forked from: it ends with the call that works in place, if any."""
        changes = self.in_place
        if changes is not None and self._stages[-1][0] != len(changes.records):
            # Nobody has looked at what was there between.
            self._begin_stage(changes, Present(self.disk))
        return self.present

    def changed_in_place(self, changes: Changes, index: int) -> None:
        """Like ``committed``, for changes that are not committed yet."""
        if not self.private or len(changes.records) == index:
            return
        records, taken = self._undoable(changes.records[index:])
        self._begin_stage(changes, self.present.supersede(records, taken))

    def _undoable(self, records: list[Record]) -> tuple[list[Record], Taken]:
        """Return changes that are not committed yet with what each replaced, and where that is."""
        for number, entry, name in replaced(records, self.store.tree, self.tree):
            record = records[number]
            room = record.room if name == record.kept else None
            records[number] = replace(record, before=entry, kept=name, room=room)
        own = self.store
        return records, Taken(own.objects, own.tree, self.tree, store=own.path)

    def changed_by(self, records: list[Record]) -> tuple[list[Parts], Look, Look]:
        """Return every path that changes which are not committed yet have changed, sorted; and
        how to look at it as it was before them, and as it is now.
        """
        if not records:
            return [], self.disk, self.disk
        records, taken = self._undoable(records)
        before = undone(Layer(self.disk), records, taken)
        return changed_paths(records, before, self.disk), before, self.disk

    def _begin_stage(self, changes: Changes, present: Present) -> None:
        self.present = present
        self._stages.append((len(changes.records), present))

    @contextlib.contextmanager
    def undoing(self, changes: Changes) -> Generator[None]:
        """Undo changes in the block; views of what is undone have nothing to show afterwards."""
        with self.external.undoing(changes):
            yield
        self._go_back_to(len(changes.records), "what this view was forked from was undone")

    def roll_back(self, changes: Changes) -> tuple[str, ...]:
        """Undo the transaction that works in place, and close it.

        Returns a sentence for each thing that could not be put back. What the disk does not let us
        look for now is looked for, and undone, before the next change.
        """
        try:
            with self.undoing(changes):
                told = changes.roll_back()
        except OSError as error:
            self.history.unfinished = functools.partial(self._roll_back_later, changes)
            told = (
                "What other programs changed could not be looked for, and nothing is put back yet"
                f" ({error.strerror}). That is tried again before the next change, and when the"
                " directory is opened again",
            )
            logger.error("%s", told[0])
            self.end_in_place(None, undone=False)
            return told
        self.end_in_place(None, undone=not changes.is_stuck)
        return told

    def _roll_back_later(self, changes: Changes) -> None:
        with self.undoing(changes):
            changes.roll_back()
        if changes.is_stuck:
            raise OSError(errno.EIO, "what an earlier call changed could not be undone")
        self.external.end()

    def end_in_place(self, serial: int | None, *, undone: bool = True) -> None:
        """Close the transaction that works in place, now that it was committed or rolled back."""
        if undone:
            self.external.end()
        self.in_place = None
        self._go_back_to(0, "the call that this view was forked from has ended")
        self._stages = []
        self.committed(serial)

    def _go_back_to(self, count: int, reason: str) -> None:
        """Have what was the present after so many changes be the present again."""
        while self._stages and self._stages[-1][0] > count:
            self._stages.pop()[1].close(reason)
        if self._stages:
            self.present = self._stages[-1][1]
            self.present.resume()


def _all_changed(
    paths: AbstractSet[Parts],
    tops: AbstractSet[Parts],
    files: AbstractSet[File],
    before: Look,
    now: Look,
) -> list[Parts]:
    """Return paths with all that is, or was, below some of them, and all names of some files."""
    found = set(paths)
    for look in (before, now):
        found.update(parts for parts, _ in walk(look, tops))
        if files:
            found |= names_of(look, files, [()])
    return sorted(found)


def _oldest(places: weakref.WeakSet[_Place]) -> int | None:
    """Return the oldest place that a snapshot or a view may still ask for."""
    return min((place.serial for place in places if not place.expired), default=None)


def _close(store: Store, tree: Tree, external: External, commands: Commands) -> None:
    commands.close()
    external.close()
    tree.close()
    store.close()


def _reading(
    operation: Callable[Concatenate[HostFilesystem, P], R],
) -> Callable[Concatenate[HostFilesystem, P], R]:
    """Run the operation on the view that the call under way works on."""

    @functools.wraps(operation)
    def on_current_view(self: HostFilesystem, *args: P.args, **kwargs: P.kwargs) -> R:
        view = current_view(self)
        try:
            if view._staging is None:  # pyright: ignore[reportPrivateUsage]
                return operation(view, *args, **kwargs)
            # What a private view sees must not change under it.
            with view._workspace.lock:  # pyright: ignore[reportPrivateUsage]
                return operation(view, *args, **kwargs)
        except OSError as error:
            if isinstance(error, WinkError):
                raise
            raise _worded(error, "read", args) from error

    return on_current_view


def _writing(
    operation: Callable[Concatenate[HostFilesystem, P], R],
) -> Callable[Concatenate[HostFilesystem, P], R]:
    """Run the operation on the current view, if it may be changed: as a whole, or not at all.

    The check and the change are under one lock: once ``seal`` has returned, nothing slips through.
    """

    @functools.wraps(operation)
    def on_current_view(self: HostFilesystem, *args: P.args, **kwargs: P.kwargs) -> R:
        view = current_view(self)
        try:
            with view._changing(operation.__name__, args):  # pyright: ignore[reportPrivateUsage]
                return operation(view, *args, **kwargs)
        except OSError as error:
            if isinstance(error, WinkError):
                raise
            raise _worded(error, "changed", args) from error

    return on_current_view


class HostFilesystem:
    """A :class:`~weakincentives.filesystem.Filesystem` over a real directory.

    Whatever a call changes is journalled beside the directory before it is made, so it can be
    undone exactly: also after the process was killed, when the directory is opened again. One
    process at a time can have a directory open.

    Args:
        root: The directory.
        prefix: The virtual prefix below which absolute paths are understood.
        store: Where to keep what undoing takes; beside the directory by default.
        durability: ``"fast"`` survives a killed process, ``"safe"`` also a loss of power.
        wait: Seconds to wait for another process that has the directory open.
        history_limit: Bytes to keep at most so that committed calls can be undone.
        unprotected: Globs of paths that may be changed although their names protect them, such as
            ``".git/config"``: see :doc:`security`. One without a slash is a name at any depth.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        prefix: str = DEFAULT_ROOT,
        store: str | os.PathLike[str] | None = None,
        durability: Literal["fast", "safe"] = "fast",
        wait: float = 0.0,
        history_limit: int = DEFAULT_LIMIT,
        clock: Clock = SYSTEM_CLOCK,
        unprotected: Sequence[str] = (),
    ) -> None:
        if not supported():
            raise NotImplementedError(
                "HostFilesystem needs a POSIX system: this one has no calls relative to directory"
                " descriptors. Use MemoryFilesystem"
            )
        if durability not in ("fast", "safe"):
            raise ValueError(f'durability must be "fast" or "safe", got {durability!r}')
        if not os.path.isdir(root):
            raise NotADirectoryError(errno.ENOTDIR, "not a directory", os.fspath(root))
        self._prefix = split_root(prefix)
        self.read_only: str | None = None
        self.call: ToolCall | None = None
        """The call that a view belongs to; it names what is committed in the history."""
        self._sealed: str | None = None
        self._parent: HostFilesystem | None = None
        # Reentrant: a log handler or finaliser that uses the filesystem must not hang.
        self._lock = threading.RLock()
        self._changes: Changes | None = None
        self._mark: int | None = None
        self._undoes: tuple[str, ...] = ()
        """The calls that a view has taken back."""
        self._staging: Staging | None = None
        self._seen: Seen | None = None
        self._ended = False
        self._workspace = _Workspace(
            Path(root),
            store=None if store is None else Path(store),
            safe=durability == "safe",
            wait=wait,
            limit=history_limit,
            clock=clock,
            unprotected=unprotected,
        )
        self._look: Look = self._workspace.disk
        self._place: _Place | None = None

    # About the whole

    @property
    def root(self) -> Path:
        """The directory, as the system names it."""
        return self._workspace.tree.path

    @property
    def store(self) -> Path:
        """Where what undoing takes is kept."""
        return self._workspace.store.path

    @property
    def reserved(self) -> Reserved:
        """What in the directory no call may change."""
        return self._workspace.reserved

    @property
    def gate(self) -> threading.Lock:
        """Held by the call that works in place; others wait for it."""
        return self._workspace.gate

    @property
    def shows_disk(self) -> bool:
        """Whether what it shows is the directory as it is: a program that reads it sees the same.

        A private view shows the directory as it was, and what the view has changed.
        """
        return current_view(self)._staging is None

    @property
    def recovered(self) -> tuple[str, ...]:
        """What opening the directory found and could not put back, a sentence each."""
        return self._workspace.recovered

    def close(self) -> None:
        """Undo what is open, and let others have the directory. May be called again."""
        workspace = self._workspace
        if not workspace.closing.alive:
            return
        with workspace.lock:
            if workspace.in_place is not None and workspace.store.pid == os.getpid():
                workspace.roll_back(workspace.in_place)
            workspace.history.journal.close()
            workspace.closing()

    def __enter__(self) -> HostFilesystem:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Reading

    def normalize(self, path: str) -> str:
        """Return the one relative spelling of a path; ``"."`` is the root."""
        return join_path(self._parts(path))

    @_reading
    def read(self, path: str) -> str:
        """Return a file's text, exactly as stored; one that is not UTF-8 raises ``BinaryFile``."""
        parts = self._parts(path)
        return decode_text(self._content(parts), join_path(parts))

    @_reading
    def read_bytes(self, path: str) -> bytes:
        """Return a file's bytes."""
        return self._content(self._parts(path))

    @_reading
    def exists(self, path: str) -> bool:
        """Tell whether there is a file or directory at the path."""
        parts = self._parts(path)
        try:
            where, node = self._find(parts, note=False)
        except FilesystemError as error:
            if not isinstance(error, NotADirectoryError):
                raise
            self._note(parts)
            return False
        if self._seen is not None:
            directory = node is not None and node.kind == "directory"
            (self._seen.glimpsed if directory else self._seen.touched).add(where)
        return node is not None

    @_reading
    def is_readonly(self, path: str) -> bool:
        """Tell whether the file may only be read; False for directories and missing files."""
        try:
            _, node = self._find(self._parts(path))
        except FilesystemError as error:
            if not isinstance(error, NotADirectoryError):
                raise
            return False
        return node is not None and node.readonly

    @_reading
    def stat(self, path: str) -> FileStat:
        """Return kind, size, time and read-only mark of what is at a path.

        A symbolic link that leads nowhere, or out of the root, is of the kind ``"link"``.
        """
        parts = self._parts(path)
        where, node = self._find(parts, follow=False)
        if node is None:
            raise nothing_there(join_path(parts))
        return _stat(join_path(parts), self._followed(where, node))

    @_reading
    def list(self, path: str = ".") -> tuple[FileStat, ...]:
        """Return a directory's entries, sorted by path."""
        parts = self._parts(path)
        where = self._directory(parts)
        prefix = _prefix(parts)
        return tuple(
            _stat(prefix + name, self._followed((*where, name), node))
            for name, node in sorted(self._look.nodes(where))
            if _can_be_named(name)
        )

    @_reading
    def unnamed(self, path: str = ".") -> tuple[str, ...]:
        """Return the names in a directory that are not UTF-8, escaped: no path can name them."""
        where = self._directory(self._parts(path))
        names = (os.fsencode(name) for name, _ in self._look.nodes(where) if not _is_text(name))
        return tuple(sorted(ascii(name.decode("latin-1"))[1:-1] for name in names))

    @_reading
    def glob(self, pattern: str, path: str = ".") -> tuple[str, ...]:
        """Return the files below ``path`` that match, sorted.

        ``*``, ``?`` and ``[a-z]`` stay within one name; ``**`` is any number of directories,
        also none. Names that start with a dot are like any other. Links to directories are not
        followed.
        """
        glob = GlobPattern(pattern, self._prefix)
        parts = self._parts(path)
        where = self._directory(parts)
        return tuple(sorted(path for path, _ in self._walk(parts, where, glob)))

    @_reading
    def grep(
        self, pattern: str, path: str = ".", *, glob: str = "**/*", limit: int | None = None
    ) -> tuple[GrepMatch, ...]:
        """Return the lines in which the regular expression is found, by path and line.

        ``path`` is a directory, or one file. Binary files are left out.
        """
        check_limit(limit)
        regex = compile_regex(pattern)
        compiled = GlobPattern(glob, self._prefix)
        parts = self._parts(path)
        where, node = self._existing(parts)
        if node.kind == "other":
            raise _not_a_file(parts, node)
        files = (
            sorted(self._walk(parts, where, compiled))
            if node.kind == "directory"
            else [(join_path(parts), where)]
        )
        matches: list[GrepMatch] = []
        for name, file in files:
            for number, line in matching_lines(self._try_read(file), regex.search):
                if len(matches) == limit:
                    return tuple(matches)
                matches.append(GrepMatch(path=name, line_number=number, line=line))
        return tuple(matches)

    @_reading
    def search(self, query: str, limit: int | None = None) -> tuple[str, ...]:
        """Return the files whose name contains ``query`` in any case, sorted by path."""
        check_limit(limit)
        wanted = query.casefold()
        where = self._directory(())
        found = (
            path
            for path, _ in self._walk((), where, GlobPattern("**/*"))
            if wanted in path.rpartition("/")[2].casefold()
        )
        return tuple(sorted(found)[:limit])

    # Writing

    @_writing
    def write(self, path: str, content: str) -> None:
        """Make the file hold exactly this text, as UTF-8. Missing parent directories are made."""
        self._put(self._parts(path), encode_text(content, path))

    @_writing
    def write_bytes(self, path: str, content: bytes) -> None:
        """Make the file hold exactly these bytes. Missing parent directories are made."""
        # A bytearray or memoryview could change later on.
        data = content if type(content) is bytes else bytes(memoryview(content))
        self._put(self._parts(path), data)

    @_writing
    def append(self, path: str, content: str) -> None:
        """Add text at the end of a file, which is made if missing."""
        added = encode_text(content, path)
        where, node = self._changeable(self._parts(path))
        self._edit.write(where, added if node is None else self._look.read(where) + added)

    @_writing
    def set_readonly(self, path: str, readonly: bool = True) -> None:
        """Mark a file as one that may only be read, or take the mark away."""
        parts = self._parts(path)
        where, node = self._existing(parts)
        if node.kind != "file":
            raise _not_a_file(parts, node)
        self._check_reach(where, node)
        mode = node.mode & ~0o222 if readonly else node.mode | 0o200
        if mode != node.mode:
            self._edit.set_attributes(where, mode=mode)
            now = self._look.node(where)
            if now is not None and now.readonly != readonly:
                raise FilesystemError(
                    f"{shown(join_path(parts))} cannot be marked: its filesystem does not keep"
                    " permissions"
                )

    @_writing
    def mkdir(self, path: str) -> None:
        """Make a directory and its missing parents; one that exists is fine."""
        parts = self._parts(path)
        where, node = self._find(parts, note=False)
        if node is not None and node.kind != "directory":
            self._note(where)
            raise file_not_directory(join_path(parts))
        if self._seen is not None:
            self._seen.cleared.add(where)
        if node is None:
            self.reserved.check(where, self._look, directory=True)
        if node is None or self._staging is not None:
            self._edit.make_directory(where)

    @_writing
    def move(self, source: str, destination: str, *, overwrite: bool = False) -> None:
        """Give a file, or a directory with all that is in it, another path.

        ``overwrite`` lets a file take the place of a file, and a directory that of a directory,
        as a whole. A symbolic link is moved itself, not what it leads to.
        """
        origin, node = self._transferable(self._parts(source), follow=False)
        target = self._free(self._parts(destination), origin, node, overwrite)
        self._check_unlocked(origin, node)
        if origin != target:
            self.reserved.check_tree(origin, self._look)
            self.reserved.check_moved(origin, target, self._look)
            self._edit.rename(origin, target)

    @_writing
    def copy(self, source: str, destination: str, *, overwrite: bool = False) -> None:
        """Copy a file or a whole directory: content, times and read-only marks.

        ``overwrite`` is as in :meth:`move`.
        """
        origin, node = self._transferable(self._parts(source), follow=True)
        if node.kind == "other":
            raise _not_a_file(origin, node)
        target = self._free(self._parts(destination), origin, node, overwrite)
        if origin != target:
            self.reserved.check_copied(origin)
            self.reserved.check_moved(origin, target, self._look)
            self._edit.copy(origin, target)

    @_writing
    def delete(self, path: str, *, recursive: bool = False) -> None:
        """Delete a file or directory; one that is not empty needs ``recursive=True``."""
        parts = self._parts(path)
        if not parts:
            raise FilesystemError("The root directory cannot be deleted. Delete what is in it")
        where, node = self._existing(parts, follow=False)
        if node.kind == "directory" and not recursive and self._look.kinds(where):
            raise FilesystemError(
                f"{shown(join_path(parts))} is not empty. Pass recursive=True to delete it with"
                " all that is in it"
            )
        self._check_unlocked(where, node)
        self.reserved.check_tree(where, self._look)
        self._edit.remove(where)

    # Going back

    @_reading
    def snapshot(self) -> object:
        """Return a token for the present state."""
        return self.snapshot_here()

    @_writing
    def restore(self, token: object) -> None:
        """Go back to the state the token stands for; those taken after it cannot be restored."""
        self.restore_here(token)

    def snapshot_here(self) -> object:
        """Like ``snapshot``, of exactly this object, whichever call is under way."""
        with self._lock:
            if self._staging is not None:
                return _Staged(self._staging, self._staging.state, self._place)
            if self._parent is not None and self._changes is not None:
                self._workspace.external.settle(self._changes)
                return _Mark(self._changes, self._changes.mark())
            return self._workspace.place()

    def restore_here(self, token: object) -> None:
        """Like ``restore``, of exactly this object, also when it is sealed or read-only.

        For the runtime, which undoes what a call did after the call has ended.
        """
        with self._workspace.lock, self._lock:
            match token:
                case _Staged() if token.staging is self._staging:
                    token.staging.state = token.state
                case _Mark() if token.changes is self._changes:
                    with self._workspace.undoing(token.changes):
                        token.changes.undo_to(token.mark)
                case _Staged() if self._staging is not None and self._is_ours(token.place):
                    # Of another view: what that one began with, and what it did.
                    self._note(())
                    self._staging.go_to(token.place, token.state)
                case _Place() if self._is_ours(token):
                    self._restore_place(token)
                case _:
                    raise ValueError("the token is not a snapshot of this filesystem")

    def _is_ours(self, place: _Place | None) -> bool:
        return place is not None and place.workspace is self._workspace

    def _restore_place(self, place: _Place) -> None:
        if place.expired:
            raise SnapshotExpired("an older snapshot was restored since this one was taken")
        if self._staging is not None:
            self._note(())
            self._staging.go_to(place, State(Layer(self._workspace.at(place))))
            return
        for other in self._workspace.places:
            other.expired = other.expired or other.serial > place.serial
        self._go_back(place.serial)

    # Views

    def fork(self) -> HostFilesystem:
        """Return a private view: it starts as this is now, and neither sees the other's changes.

        What it writes is kept beside the directory until it is merged. A view of a call that works
        in place ends with it: once that call has ended, or what it had done until the fork was
        undone, the view raises ``ViewClosed``, also on reading.
        """
        workspace = self._workspace
        with workspace.lock, self._lock:
            view = self._view()
            if self._staging is None:
                view._staging = Staging(workspace.forked(), workspace.store)
            else:
                view._staging = Staging(self._staging.layer, workspace.store)
            view._look = view._staging
            view._seen = Seen()
            view._place = None if self._staging is not None else workspace.place()
            workspace.private.add(view)
        return view

    def fork_in_place(self) -> HostFilesystem:
        """Return a view that changes the directory itself, journalled; within one, a savepoint.

        There is one at a time: hold ``gate`` while it is open.
        """
        if self._staging is not None:
            raise ValueError("a private view cannot be worked on in place")
        workspace = self._workspace
        with workspace.lock:
            view = self._view()
            if self._parent is not None and self._changes is not None:
                view._changes = self._changes
                view._lock = self._lock  # sealing one waits for a change within the other
                workspace.external.settle(self._changes)
                view._mark = self._changes.mark()
                return view
            if workspace.in_place is not None:
                raise RuntimeError("another call works on this directory in place: hold its gate")
            workspace.commands.wait()
            view._changes = workspace.begin_in_place()
        return view

    def _view(self) -> HostFilesystem:
        view = HostFilesystem.__new__(HostFilesystem)
        view.__dict__.update(self.__dict__)
        view.read_only = view._sealed = None
        view._lock = threading.RLock()
        view._parent = self
        view._ended = False
        view._mark = None
        view._undoes = ()
        view.call = call_under_way() or self.call
        return view

    def check_conflicts(self, view: HostFilesystem) -> None:
        """Raise MergeConflict if something the view depends on has changed here since the fork."""
        self._check_parent(view)
        if view._staging is None or view._seen is None:
            return
        with self._workspace.lock, self._lock, view._lock:
            base = view._staging.base
            if isinstance(base, Present):
                changed = base.changed()
            else:
                assert isinstance(base, Layer)
                assert self._staging is not None
                changed = base.differing(self._staging.layer)
            if changed.paths or changed.files:
                _check_conflicts(view._seen, changed, view._staging.base, self._look)

    def merge(self, view: HostFilesystem) -> None:
        """Bring a view's changes in, all of them or none. A sealed view can be merged.

        Raises:
            MergeConflict: Something the view read or changed has changed here since the fork.
        """
        self._check_parent(view)
        with self._workspace.lock, self._lock, view._lock:
            if view._ended:
                raise ValueError("the view was merged or discarded before")
            if view._staging is None:
                try:
                    self._keep(view)
                except OSError as error:
                    if isinstance(error, WinkError):
                        raise
                    raise _worded(error, "kept", ()) from error
            else:
                self._merge_private(view, view._staging)

    def discard(self, view: HostFilesystem) -> tuple[str, ...]:
        """Undo what a view changed. May be called again.

        Returns a sentence for each thing that could not be put back; normally there is none.
        """
        self._check_parent(view)
        workspace = self._workspace
        view.seal("this view was discarded")
        if view._staging is None:
            workspace.commands.wait_in_place()  # a call that was given up may run one: it is killed
        with workspace.lock, view._lock:
            if view._ended:
                return ()
            left = self._undo(view)
            # Last: one that was interrupted is to be called again.
            view._ended = True
            return left

    def _undo(self, view: HostFilesystem) -> tuple[str, ...]:
        workspace = self._workspace
        if view._staging is not None:
            workspace.private.discard(view)
            view._staging.drop()
            return ()
        changes = view._changes
        if changes is None or workspace.in_place is not changes:
            return ()  # it has ended, with all that was nested in it
        if view._mark is None:
            return workspace.roll_back(changes)
        with workspace.undoing(changes):
            return changes.undo_to(view._mark)

    def _keep(self, view: HostFilesystem) -> None:
        """Keep what was changed in place; the outermost view's changes are committed."""
        changes = view._changes
        if view._mark is None and changes is not None:
            self._workspace.external.settle(changes, last=True)
            if self._workspace.external.expected(changes):
                self._check_found(changes.since(None))
            self._workspace.end_in_place(changes.commit(view.call, view._undoes))
        else:
            self._undoes += view._undoes
        view._ended = True
        view.seal("this view was merged")

    def _merge_private(self, view: HostFilesystem, staging: Staging) -> None:
        self.check_conflicts(view)
        if staging.changed:
            self._check_writable("merge", ())
        if self._staging is not None and self._seen is not None and view._seen is not None:
            self._seen.include(view._seen)
        if not staging.changed:
            return
        try:
            with self._whole() if self._parent is not None else self._transaction(view.call):
                staging.replay(self._edit, self._go_to)
        except OSError as error:
            if isinstance(error, WinkError):
                raise
            if error.errno in _NOT_AS_IT_WAS:
                raise MergeConflict(f"Changed by someone else in the meantime: {error}") from error
            raise _worded(error, "changed", ()) from error

    def _go_to(self, place: object) -> None:
        assert isinstance(place, _Place)
        if self._staging is not None:
            self._staging.go_to(place, State(Layer(self._workspace.at(place))))
        elif self._changes is not None:
            go_back(self._changes, self._workspace.history, place.serial)

    def seal(self, reason: str) -> None:
        """Refuse every later change with ``ViewClosed`` and log it; reading still works."""
        with self._lock:
            if self._sealed is None:
                self._sealed = reason

    @property
    def touched(self) -> frozenset[str]:
        """The paths a private view has read or changed, directories standing for all below."""
        with self._lock:
            seen = self._seen or Seen()
            paths = seen.touched | seen.glimpsed | seen.cleared
            return frozenset(join_path(parts) for parts in paths)

    @property
    def written(self) -> frozenset[str]:
        """The paths a private view has changed, directories standing for all below."""
        paths = () if self._staging is None else self._staging.written
        return frozenset(join_path(parts) for parts in paths)

    def behind_links(self, patterns: Sequence[str]) -> frozenset[Parts]:
        """Return what paths that match some patterns lead to through links, below the root.

        It is looked for once: a call that may not change such paths cannot make more of them.
        """
        workspace = self._workspace
        with workspace.lock:
            found = workspace.links.get(patterns)
            if found is None:
                found = workspace.links[patterns] = self._links_behind(PathPatterns(patterns))
            return found

    def _links_behind(self, patterns: PathPatterns) -> frozenset[Parts]:
        found: set[Parts] = set()
        named = [parts for parts in patterns.literals if self._looks_linked(parts)]
        pending: list[Parts] = [()]
        while pending:
            here = pending.pop()
            with contextlib.suppress(OSError):
                for name, kind in self._workspace.disk.kinds(here):
                    parts = (*here, name)
                    if kind == "link" and patterns.match("/".join(parts)):
                        named.append(parts)
                    elif kind == "directory" and patterns.any_depth:
                        pending.append(parts)
        for parts in named:
            with contextlib.suppress(FilesystemError, OSError):  # it leads outside, or nowhere
                found.add(self._workspace.tree.resolve(parts, seen=found))
        return frozenset(found)

    def _looks_linked(self, parts: Parts) -> bool:
        with contextlib.suppress(FilesystemError, OSError):
            return self._workspace.tree.resolve(parts) != parts
        return False

    def changed_here(self) -> tuple[str, ...]:
        """Return every path that this view has changed since it was forked, sorted.

        Of a directory that came, went or was moved, all that is in it; of a file with several
        names, all of them. What costs is what was changed: only a file with several names that is
        changed in place is looked for everywhere.
        """
        with self._workspace.lock, self._lock:
            return tuple(map(join_path, self._changed_here()[0]))

    def diff_here(self) -> tuple[FileChange, ...]:
        """Return what this view has changed since it was forked, file by file."""
        with self._workspace.lock, self._lock:
            return tuple(file_changes(*self._changed_here()))

    def _changed_here(self) -> tuple[list[Parts], Look, Look]:
        """Return what was changed, and how to look at it as it was before and as it is now."""
        if self._staging is not None:
            staging = self._staging
            files = set(staging.layer.files)
            changed = _all_changed(staging.written, staging.wholes, files, staging.base, staging)
            return changed, staging.base, staging
        if self._parent is None or self._changes is None:
            return [], self._look, self._look
        self._workspace.external.settle(self._changes)
        return self._workspace.changed_by(self._changes.since(self._mark))

    # Commands

    def run(
        self,
        argv: Sequence[str] | str,
        *,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        timeout: float | None = None,
        output_limit: int = DEFAULT_OUTPUT_LIMIT,
        check: bool = False,
        watch: Watch | None = None,
    ) -> CommandResult:
        """Run a command in the directory; what it changes is kept or undone with the call.

        The command sees the files as the call sees them. Over an overlay (Linux), nobody sees what
        it changes before it has ended; elsewhere what it changed is found by looking. When it is
        killed, by a timeout for one, the directory is as if it had never run. Processes that it
        leaves behind are killed.

        This is not a sandbox: a command can read and change whatever this process can, and what
        it does outside of the directory is not undone.

        Args:
            argv: The program and its arguments; one string is run by ``sh -c``.
            cwd: Where to start it.
            env: All of its environment; this process's own by default.
            stdin: What it can read; nothing by default.
            timeout: Seconds after which it is killed.
            output_limit: Bytes of each of its outputs to keep; the middle of more is left out.
            check: Raise :class:`~weakincentives.errors.CommandFailed` when it does not end well;
                then what it changed is not kept.
            watch: Asked again and again while the command runs; what it returns is why the command
                is killed then, as by a timeout.
        """
        view = current_view(self)
        command = Command.of(
            argv, env=env, stdin=stdin, timeout=timeout, limit=output_limit, watch=watch
        )
        if view._parent is not None:
            return view._run(command, cwd, check)
        with view._turn():
            inner = view.fork_in_place()
            try:
                result = inner._run(command, cwd, check)
            except BaseException:
                view.discard(inner)
                raise
            view.merge(inner)
            return result

    def _run(self, command: Command, cwd: str, check: bool) -> CommandResult:
        workspace = self._workspace
        with workspace.lock, self._lock:
            if self._is_given_up() or self.read_only is None:
                self._check_writable("run", ())
            where = self._directory(self._parts(cwd))
            command = replace(command, directory=self.root.joinpath(*where))
            way = workspace.commands.way(self.root)
            alone = self._staging is None and self.read_only is None
            if isinstance(way, str) and not alone:
                raise FilesystemError(
                    "A command that runs beside others, or may change nothing, needs an overlay:"
                    f" {way}. Run it in a call of its own"
                )
            layers = None if isinstance(way, str) else workspace.commands.begin(way, self.root)
        if isinstance(way, str) or layers is None:
            return self._run_scanned(command, str(way), check)
        try:
            return self._run_over(command, layers, check)
        finally:
            workspace.commands.end(layers)

    def _run_over(self, command: Command, layers: Layers, check: bool) -> CommandResult:
        """Run a command over an overlay, and make what it changed this view's changes."""
        tree = self._workspace.tree
        try:
            layers.prepare(command.stdin)
            if self._staging is not None:
                self._note(())  # nobody knows what the command reads
                layers.cover(self._staging, self._staging.covered, tree)
            ran = run_over(layers, command, self._is_given_up)
            steps = layers.steps(tree) if ran.is_kept(check) else []
            if steps and self.read_only is not None:
                raise ReadOnlyView(self.read_only)
            if steps or self._is_given_up():
                with self._changing("run", ()):
                    apply_steps(steps, self._edit, self._check_step)
        except ProtectedPath as error:
            raise ProtectedPath(f"{error}. Nothing that the command changed was kept") from error
        except OSError as error:
            if isinstance(error, WinkError):
                raise
            raise FilesystemError(
                f"What the command changed could not be kept: {error.strerror}"
            ) from error
        return ran.result("overlay", None, check=check)

    def _check_step(self, step: Step) -> bool:
        """Raise if what a command did is a change that no call may make; False if it is none."""
        reserved, look, parts = self.reserved, self._look, step.parts
        if step.action == "remove":
            reserved.check_tree(parts, look)
            return True
        if step.action == "move" and step.source is not None and reserved.problem(parts, look):
            tree, place = step.source
            status = tree.status(place)
            if (
                status is not None
                and stat.S_ISREG(status.st_mode)
                and reserved.is_rewritten_as_it_was(
                    parts, look, tree.read(place)[0], stat.S_IMODE(status.st_mode)
                )
            ):
                return False
        directory = step.action == "directory"
        if step.action in ("attributes", "rewrite"):
            node = look.node(parts)
            directory = node is not None and node.kind == "directory"
            if node is not None and node.links > 1 and node.file is not None:
                self._check_names({node.file})
        reserved.check(parts, look, directory=directory)
        return True

    def _run_scanned(self, command: Command, reason: str, check: bool) -> CommandResult:
        """Run a command on the directory itself, and find what it changed."""
        external, changes = self._workspace.external, self._changes
        assert changes is not None
        with contextlib.ExitStack() as under_way:
            with self._workspace.lock, self._lock:
                self._check_writable("run", ())
                under_way.enter_context(self._workspace.commands.in_place())
                external.begin(changes)
            index = len(changes.records)
            try:
                ran = run_plainly(command, self._workspace.store, self._is_given_up)
                with self._lock:
                    external.settle(changes)
                    if ran.is_kept(check):
                        self._check_writable("run", ())
                        self._check_found(changes.records[index:])
                        self._workspace.changed_in_place(changes, index)
                        return ran.result("scan", reason, check=check)
            except BaseException:
                self._undo_scanned(changes, index)
                raise
            self._undo_scanned(changes, index)
        if self._is_given_up():
            self._check_writable("run", ())
        return ran.result("scan", reason, check=check)

    def _check_found(self, records: list[Record]) -> None:
        """Raise if other programs have made changes that no call may make."""
        try:
            self.reserved.check_changed(*self._workspace.changed_by(records))
        except ProtectedPath as error:
            raise ProtectedPath(f"{error}. All that was changed is undone") from error

    def _is_given_up(self) -> bool:
        return self._why_sealed() is not None

    def _why_sealed(self) -> str | None:
        """Return why this view, or one that it is a savepoint of, takes no more changes, or None.

        A call that was given up may be in the middle of one that is nested in it.
        """
        view = self
        while view._sealed is None and view._mark is not None and view._parent is not None:
            view = view._parent
        return view._sealed

    def _undo_scanned(self, changes: Changes, index: int) -> None:
        with self._lock, self._workspace.external.undoing(changes):
            changes.undo_since(index)

    def expect_external(self) -> None:
        """Expect other programs to change the directory until this view is merged or discarded.

        What they change is then found, and kept or undone with the call.
        """
        if self._parent is None or self._changes is None:
            raise ValueError("only a call that works in place can start programs of its own")
        with self._workspace.lock, self._lock:
            self._check_writable("expect_external", ())
            self._workspace.external.begin(self._changes)

    # What was committed

    def history(self) -> tuple[Committed, ...]:
        """Return the calls that changed files and can be undone, oldest first."""
        workspace = self._workspace
        with workspace.lock:
            history = workspace.history
            return tuple(delta.committed for delta in history.readable(history.serials()))

    def diff(self, call_id: str) -> str:
        """Return what a call changed, as a unified diff."""
        workspace = self._workspace
        with workspace.lock:
            history, serial = workspace.history, self._serial_of(call_id)
            return diff_of(history, [serial], workspace.disk)

    def changed_since(self, token: object) -> tuple[str, ...]:
        """Return the paths that were changed by what was committed since a snapshot, sorted.

        A directory that was moved stands for all that is in it.
        """
        if not isinstance(token, _Place) or not self._is_ours(token):
            raise ValueError("the token is not a snapshot of this filesystem")
        history = self._workspace.history
        with self._workspace.lock:
            deltas = history.readable(history.after(token.serial))
            return tuple(sorted({path for delta in deltas for path in delta.committed.paths}))

    def revert_to(self, call_id: str) -> tuple[str, ...]:
        """Go back to how things were right after a call: what came later is undone.

        What someone else has changed since is left alone, and kept as it would be in the store.
        That is itself a change that the history has, so it can be undone. Returns a sentence for
        each thing that was left alone.
        """
        if self._staging is not None:
            raise ValueError("a private view has no history of its own")
        with self._workspace.lock, self._lock:
            self._check_writable("revert_to", (call_id,))
            serial = self._serial_of(call_id)
            with contextlib.nullcontext() if self._parent is None else self._whole():
                return self._go_back(serial)

    def undo(self, *call_ids: str, force: bool = False) -> tuple[str, ...]:
        """Take back what some calls changed, and nothing else: all of it, or nothing.

        That is itself a change that the history has, so it can be undone, too. Returns a sentence
        for each thing that is not as it was before the calls: a directory that holds more by now.

        Raises:
            UndoRefused: Something is not as these calls left it. ``force`` replaces it; what it
                was is then kept in the history.
        """
        if self._staging is not None:
            raise ValueError("a private view has no history of its own")
        workspace = self._workspace
        with workspace.lock, self._lock:
            self._check_writable("undo", call_ids)
            serials = [self._serial_of(call_id) for call_id in call_ids]
            if not serials:
                return ()
            if self._parent is not None and self._changes is not None:
                with self._whole():
                    told = take_back(self._changes, workspace.history, serials, force=force)
                self._undoes += call_ids
                return told
            with self._transaction(call_under_way(), call_ids) as changes:
                return take_back(changes, workspace.history, serials, force=force)

    def _serial_of(self, call_id: str) -> int:
        history = self._workspace.history
        for delta in history.readable(reversed(history.serials())):
            if delta.committed.call_id == call_id:
                return delta.committed.serial
        raise LookupError(f"the history has no call {call_id!r}")

    def _go_back(self, serial: int) -> tuple[str, ...]:
        history = self._workspace.history
        later = history.readable(history.after(serial))
        undoes = [delta.committed.call_id for delta in later]
        if self._parent is not None and self._changes is not None:
            told = go_back(self._changes, history, serial)
            self._undoes += tuple(undoes)
            return told
        with self._transaction(call_under_way(), undoes) as changes:
            return go_back(changes, history, serial)

    # Changing, as a whole

    @property
    def _edit(self) -> Changes | Staging:
        edit = self._staging or self._changes
        assert edit is not None
        return edit

    @contextlib.contextmanager
    def _changing(self, operation: str, args: tuple[object, ...]) -> Generator[None]:
        if self._parent is None:
            with self._turn(), self._workspace.lock, self._lock, undisturbed():
                self._check_writable(operation, args)
                if operation == "restore":
                    yield
                    return
                with self._transaction(None):
                    yield
            return
        # A command may take its time, and undoes itself when it is interrupted.
        with self._lock, undisturbed(operation != "run"):
            self._check_writable(operation, args)
            with self._whole(anew=operation == "run"):
                yield

    @contextlib.contextmanager
    def _turn(self) -> Generator[None]:
        """Wait until no call works in place."""
        workspace = self._workspace
        if workspace.in_place is not None and workspace.in_place_thread == threading.get_ident():
            raise FilesystemError(
                "A call works on this directory in place. Make the change through its view"
            )
        with workspace.gate:
            if workspace.in_place is not None:
                raise FilesystemError(
                    "A call works on this directory in place. Try again when it has ended"
                )
            yield

    @contextlib.contextmanager
    def _transaction(self, call: ToolCall | None, undoes: Sequence[str] = ()) -> Generator[Changes]:
        """Commit the changes that are made in the block, or undo them if it raises."""
        workspace = self._workspace
        workspace.commands.wait()
        changes = self._changes = Changes(workspace.tree, workspace.history)
        try:
            yield changes
            serial = changes.commit(call, undoes)
        except BaseException:
            changes.roll_back()
            raise
        finally:
            self._changes = None
        workspace.committed(serial)

    @contextlib.contextmanager
    def _whole(self, *, anew: bool = True) -> Generator[None]:
        """Undo what the block did to this view if it raises.

        Without ``anew``, what this view itself has put at a path is not kept when it is replaced:
        only for a block that puts one thing at one path.
        """
        if self._staging is not None:
            state = self._staging.state
            try:
                yield
            except BaseException:
                self._staging.state = state
                raise
            return
        changes = self._changes
        assert changes is not None
        if anew or self._workspace.private:
            changes.keep_anew()
        self._workspace.external.settle(changes)
        index = len(changes.records)
        try:
            yield
        except BaseException:
            with self._workspace.external.undoing(changes):
                changes.undo_since(index)
            raise
        self._workspace.external.refresh(changes)
        self._workspace.changed_in_place(changes, index)

    def _check_parent(self, view: HostFilesystem) -> None:
        if view._parent is not self:
            raise ValueError("only a view that was forked from this filesystem can be merged")

    def _check_writable(self, operation: str, args: tuple[object, ...]) -> None:
        check_open(operation, args, self._why_sealed(), self.read_only)
        if self._workspace.store.pid != os.getpid():
            raise ViewClosed("this filesystem belongs to the process that opened it")
        if not self._workspace.closing.alive:
            raise ViewClosed("this filesystem was closed")

    # One step of an operation each. All act on exactly this object.

    def _parts(self, path: str) -> Parts:
        return split_path(path, self._prefix)

    def _note(self, parts: Parts) -> None:
        if self._seen is not None:
            self._seen.touched.add(parts)

    def _find(
        self, parts: Parts, *, follow: bool = True, note: bool = True
    ) -> tuple[Parts, Node | None]:
        """Return the canonical path, and what is there; a private view depends on it."""
        for _ in range(RETRIES):
            found = self._try_find(parts, follow)
            if found is not None:
                if note:
                    self._note(found[0])
                return found
        raise escapes(parts)

    def _try_find(self, parts: Parts, follow: bool) -> tuple[Parts, Node | None] | None:
        """Like ``_find``; None when links came or went meanwhile."""
        try:
            node = self._look.node(parts)
            if node is None or node.kind != "link" or not follow:
                return parts, node
        except OSError as error:
            if error.errno not in BARRED:
                raise
        links = None if self._seen is None else self._seen.touched
        where = resolve(
            parts,
            self._look.link_target,
            self._workspace.tree.below_root,
            follow=follow,
            seen=links,
        )
        try:
            node = self._look.node(where)
        except OSError as error:
            if error.errno not in BARRED:
                raise
            self._check_barred(where)
            return None
        return None if node is not None and node.kind == "link" and follow else (where, node)

    def _check_barred(self, parts: Parts) -> None:
        """Raise if a file is in the way."""
        for depth in range(1, len(parts)):
            try:
                node = self._look.node(parts[:depth])
            except OSError:
                return
            if node is not None and node.kind in ("file", "other"):
                self._note(parts[:depth])
                raise file_not_directory(join_path(parts[:depth]))

    def _existing(self, parts: Parts, *, follow: bool = True) -> tuple[Parts, Node]:
        where, node = self._find(parts, follow=follow)
        if node is None:
            raise nothing_there(join_path(parts))
        return where, node

    def _directory(self, parts: Parts) -> Parts:
        where, node = self._existing(parts)
        if node.kind != "directory":
            raise file_not_directory(join_path(parts))
        return where

    def _content(self, parts: Parts) -> bytes:
        if self._staging is None:
            # One open that follows no link; only where that fails is there more to find out.
            try:
                return self._look.read(parts)
            except OSError as error:
                if error.errno == errno.EBADF:
                    raise ViewClosed("this filesystem was closed") from error
        where, node = self._existing(parts)
        if node.kind != "file":
            raise _not_a_file(parts, node)
        return self._look.read(where)

    def _try_read(self, where: Parts) -> bytes:
        try:
            return self._look.read(where)
        except OSError:
            return b""  # gone meanwhile, or not to be read: there is nothing to be found in it

    def _followed(self, parts: Parts, node: Node) -> Node:
        """Return what a link leads to, where that is below the root."""
        if node.kind != "link":
            return node
        try:
            _, found = self._find(parts)
        except FilesystemError:
            return node
        return found or node

    def _walk(self, parts: Parts, where: Parts, glob: GlobPattern) -> Iterator[tuple[str, Parts]]:
        """Yield path and canonical path of each file below a directory that matches."""
        pending = [(where, _prefix(parts), glob.start(parts))]
        while pending:
            directory, prefix, positions = pending.pop()
            for name, kind in self._entries(directory, glob.names(positions)):
                if not _can_be_named(name):
                    continue
                reached = glob.step(positions, name)
                here = (*directory, name)
                if kind == "directory":
                    if reached:
                        pending.append((here, f"{prefix}{name}/", reached))
                elif glob.matched(reached):
                    file = here if kind == "file" else self._file_behind(here, kind)
                    if file is not None:
                        yield prefix + name, file

    def _entries(self, directory: Parts, names: frozenset[str] | None) -> Iterator[tuple[str, str]]:
        """Yield what is in a directory, or those of some names that are there."""
        if names is None:
            with contextlib.suppress(OSError):  # gone meanwhile, or not to be looked into
                yield from self._look.kinds(directory)
            return
        for name in names:
            with contextlib.suppress(OSError):
                node = self._look.node((*directory, name))
                if node is not None:
                    yield name, node.kind

    def _file_behind(self, parts: Parts, kind: str) -> Parts | None:
        if kind != "link":
            return None
        try:
            where, node = self._find(parts)
        except (FilesystemError, OSError):
            return None
        return where if node is not None and node.kind == "file" else None

    def _changeable(self, parts: Parts) -> tuple[Parts, Node | None]:
        """Return the file to be changed, or None for one that is still to be made."""
        where, node = self._find(parts)
        if node is not None:
            if node.kind != "file":
                raise _not_a_file(parts, node)
            if node.readonly:
                raise read_only(join_path(parts))
            self._check_reach(where, node)
        elif not where:
            raise directory_not_file(join_path(parts))
        else:
            self._check_barred(where)
            self.reserved.check(where, self._look)
        return where, node

    def _check_reach(self, where: Parts, node: Node) -> None:
        """Raise if a file, or another name of it, is one that no call may change."""
        self.reserved.check(where, self._look)
        if node.links > 1 and node.file is not None:
            self._check_names({node.file})

    def _check_names(self, files: AbstractSet[File]) -> None:
        # A change of one with several names shows under all of them.
        for name in names_of(self._look, files, [()]):
            self.reserved.check(name, self._look)

    def _put(self, parts: Parts, data: bytes) -> None:
        where, _ = self._changeable(parts)
        self._edit.write(where, data)

    def _transferable(self, parts: Parts, *, follow: bool) -> tuple[Parts, Node]:
        if not parts:
            raise FilesystemError(
                "The root directory cannot be moved or copied. Name what is in it"
            )
        where, node = self._existing(parts, follow=follow)
        if not where:
            raise FilesystemError(
                "The root directory cannot be moved or copied. Name what is in it"
            )
        return where, node

    def _free(self, parts: Parts, origin: Parts, node: Node, overwrite: bool) -> Parts:
        """Return where to put something, if it can be put there."""
        target, there = self._find(parts, follow=False)
        old, new = shown(join_path(origin)), shown(join_path(target))
        if target != origin and target[: len(origin)] == origin:
            raise FilesystemError(f"{old} cannot be put into itself, at {new}")
        if there is None:
            return target
        if not overwrite:
            raise AlreadyExists(f"{new} exists. Pass overwrite=True to replace it")
        if target != origin and origin[: len(target)] == target:
            raise FilesystemError(f"{new} cannot be replaced by {old}, which is in it")
        if there.kind == "directory" and node.kind != "directory":
            raise directory_not_file(join_path(target))
        if there.kind != "directory" and node.kind == "directory":
            raise file_not_directory(join_path(target))
        self._check_unlocked(target, there)
        if target != origin:
            self.reserved.check_tree(target, self._look)
        return target

    def _check_unlocked(self, parts: Parts, node: Node) -> None:
        """Raise if it, or a file in it, may only be read."""
        if node.readonly:
            raise read_only(join_path(parts))
        pending = [parts] if node.kind == "directory" else []
        while pending:
            directory = pending.pop()
            for name, inner in self._look.nodes(directory):
                if inner.readonly:
                    raise read_only(f"A file in {join_path(parts)}")
                if inner.kind == "directory":
                    pending.append((*directory, name))


def _check_conflicts(seen: Seen, changes: Changed, base: Look, current: Look) -> None:
    """Raise if anything the view depends on is not what it was when the view was forked."""
    changed = changes.paths
    if changes.files:
        changed = changed | names_of(base, changes.files, seen.touched)
    changed = {parts for parts in changed if not _is_same(base, current, parts)}
    within = {parts[:depth] for parts in changed for depth in range(len(parts) + 1)}

    def differs(parts: Parts) -> bool:
        if parts in within:
            return True
        inside = any(parts[:depth] in changed for depth in range(len(parts)))
        return inside and not _is_same(base, current, parts)

    conflicts = {parts for parts in seen.touched if differs(parts)}
    conflicts |= {
        parts
        for parts in seen.glimpsed
        if differs(parts) and not (_is_directory(base, parts) and _is_directory(current, parts))
    }
    conflicts |= {parts for parts in seen.cleared if differs(parts) and _bars(current, parts)}
    if conflicts:
        raise conflict(conflicts)


def _is_same(base: Look, current: Look, parts: Parts) -> bool:
    """Tell whether what is at a path, with all that is below it, is what was there."""
    pending = [parts]
    while pending:
        place = pending.pop()
        was, now = _node(base, place), _node(current, place)
        if not _is_alike(was, now):
            return False
        if was is not None and was.kind == "directory":
            # It may have been replaced as a whole: then nobody has noted what changed below it.
            names = _names(base, place)
            if names != _names(current, place):
                return False
            pending += [(*place, name) for name in names]
    return True


def _is_alike(was: Node | None, now: Node | None) -> bool:
    if was is None or now is None:
        return was is now
    if (was.kind, was.mode) != (now.kind, now.mode):
        return False
    if was.kind == "directory":
        return True
    if was.file != now.file and max(was.links, now.links) > 1:
        return False  # another file, even if it holds the same
    return (was.size, was.mtime_ns) == (now.size, now.mtime_ns)


def _names(look: Look, parts: Parts) -> set[str]:
    try:
        return {name for name, _ in look.kinds(parts) if not name.startswith(TEMPORARY)}
    except OSError:
        return set()


def _node(look: Look, parts: Parts) -> Node | None:
    try:
        return look.node(parts)
    except OSError:
        return _BARRED


_BARRED = Node("other", -1, 0, 0, 0)


def _is_directory(look: Look, parts: Parts) -> bool:
    node = _node(look, parts)
    return node is not None and node.kind == "directory"


def _bars(look: Look, parts: Parts) -> bool:
    node = _node(look, parts)
    return node is not None and node.kind != "directory"


def _stat(path: str, node: Node) -> FileStat:
    return FileStat(
        path=path,
        kind=node.kind,
        size=node.size if node.kind == "file" else 0,
        modified=node.mtime_ns / 1e9,
        readonly=node.readonly,
    )


def _prefix(parts: Parts) -> str:
    return f"{join_path(parts)}/" if parts else ""


def _can_be_named(name: str) -> bool:
    """Whether a name is text, and nobody's business but the user's."""
    if name.startswith(TEMPORARY):
        return False
    return _is_text(name)


def _is_text(name: str) -> bool:
    return name.isascii() or not any("\ud800" <= character <= "\udfff" for character in name)


def _not_a_file(parts: Parts, node: Node) -> FilesystemError:
    name = join_path(parts)
    if node.kind == "directory":
        return directory_not_file(name)
    return FilesystemError(
        f"{shown(name)} is not a regular file but a pipe, socket or device. Give the path of a file"
    )


def _worded(error: OSError, what: str, args: Sequence[object]) -> FilesystemError:
    """Return the system's error in words for the model."""
    path = args[0] if args and isinstance(args[0], str) else "."
    if error.errno == errno.ENOENT:
        return nothing_there(path)
    reason = os.strerror(error.errno) if error.errno else str(error)
    return FilesystemError(f"{shown(path)} could not be {what}: {reason}")
