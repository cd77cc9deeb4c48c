"""The history of committed calls: what was at each changed path, up to a size limit."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import logging
import math
import os
import re
import stat
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from weakincentives.core.call import ToolCall
from weakincentives.core.clock import SYSTEM_CLOCK, Clock
from weakincentives.core.gate import ProcessLock
from weakincentives.core.state import SEAL_SIZE, Seals, no_links
from weakincentives.errors import (
    ContentDamaged,
    HistoryDamaged,
    LogDamaged,
    LogUnavailable,
    WorkspaceLocked,
)
from weakincentives.filesystem.contents import KEPT, Contents
from weakincentives.filesystem.entry import (
    Entry,
    apply_entry,
    capture,
    copy_content,
    copy_exactly,
    digest_of,
    link,
    new_file,
)
from weakincentives.filesystem.journal import (
    JOURNAL,
    Journal,
    Record,
)
from weakincentives.filesystem.operations import changed
from weakincentives.filesystem.paths import Parts, join_path
from weakincentives.filesystem.redo import MakeRedo, Redo, keep
from weakincentives.filesystem.scratch import NOTE, TEMPORARY
from weakincentives.filesystem.store import (
    HISTORY_LIMITS,
    Limits,
    Note,
    Objects,
    Source,
    Store,
    checked_parts,
    left_in,
    may_compress,
    open_store,
    present_in,
    store_of,
    write_note,
    write_whole,
)
from weakincentives.filesystem.tree import Held, Tree, remove_tree, write_all
from weakincentives.log import CallRecord, Log, Operation, Summary
from weakincentives.log import Entry as Value

logger = logging.getLogger("weakincentives.filesystem")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A committed call that changed files."""

    serial: int
    """Its number in the history of the workspace, from 1."""
    call_id: str
    tool: str
    """Empty for changes outside of any call."""
    time: float
    """Seconds since the epoch."""
    paths: tuple[str, ...]
    """The changed paths, sorted; a directory stands for everything in it."""
    size: int
    """Bytes stored so that it can be undone."""
    undoes: tuple[str, ...] = ()
    """The calls that it undid."""
    partly: tuple[str, ...] = ()
    """Those of them of which it left something: what others had changed since."""


BRANCHES = "branches"
"""The folder with the branches of a workspace, each with a file ``log``."""


class _Bases:
    """The call that the oldest branch of a workspace begins at: its base needs all later ones."""

    def __init__(self, store: Path) -> None:
        self._folder = store / BRANCHES
        self._known: tuple[int, int | None] = (0, None)

    def __call__(self) -> int | None:
        try:
            changed = os.stat(self._folder).st_mtime_ns
        except FileNotFoundError:
            return None
        if changed != self._known[0]:
            found = (self._base(name) for name in os.listdir(self._folder))
            bases = [base for base in found if base is not None]
            self._known = changed, min(bases, default=None)
        return self._known[1]

    def _base(self, name: str) -> int | None:
        # The seal is not checked: a planted branch can only keep calls from being removed.
        with (
            contextlib.suppress(OSError, ValueError, LookupError, TypeError),
            open(self._folder / name / "log", "rb", opener=no_links) as file,
        ):
            return int(json.loads(file.readline()[SEAL_SIZE + 1 :])["base"])
        return None


_NEVER = (-1, -1)


class Past:
    """Read access to the committed calls in a store, without a lock.

    Calls may be committed or trimmed at any time.
    """

    def __init__(self, store: Path) -> None:
        self.objects = Objects(store / "objects")
        self.needed_by: list[Callable[[], int | None]] = [_Bases(store)]
        """Each returns the call after which nothing may be removed; None if it needs none."""
        self._store = store
        self._log: Log | None = None
        self._log_of = 0
        """The process that has opened the log."""
        self._summaries: dict[int, Summary] | None = None
        """By number, oldest first; with those whose rows are lost."""
        self._lost: Set[int] = frozenset()
        self._total: int | None = None
        self._seen_at = _NEVER
        self._last = 0
        self._logged: set[int] = set()

    def _opened(self) -> Log | None:
        """Return the log; None if there is none yet."""
        if self._log is not None and self._log_of == os.getpid():
            return self._log
        with contextlib.suppress(LookupError):
            return self._open(create=False)
        return None

    def _open(self, *, create: bool, safe: bool = False) -> Log:
        if self._log is not None:
            _of_parents.append(self._log)  # closing it here would drop locks of the parent
        self._log, self._log_of = Log(self._store / LOG, safe=safe, create=create), os.getpid()
        weakref.finalize(self, _close_log, self._log, self._log_of)
        return self._log

    @property
    def contents(self) -> Contents:
        """Reads what operations name."""
        log = self._opened()
        if log is None:
            raise LogUnavailable(f"{self._store / LOG} is not there")
        return Contents(self._store, log)

    def content(self, digest: str) -> bytes:
        """Return a stored content; raises OSError if it is not there."""
        log = self._opened()
        if log is not None:
            with contextlib.suppress(LookupError):
                return log.content(digest)
        return self.objects.read(digest)

    @property
    def last(self) -> int:
        """The newest serial; 0 if there is none."""
        self._known()
        return self._last

    def serials(self) -> list[int]:
        """Return the serials still in the history, oldest first."""
        return sorted(self._known())

    def after(self, serial: int) -> list[int]:
        """Return the serials after one, newest first."""
        return [known for known in reversed(self.serials()) if known > serial]

    def touching(self, parts: Parts, *, below: bool = False) -> list[int]:
        """Return the operations that changed a path or something above it, oldest first.

        With ``below``, also those that changed something below it.
        """
        log = self._opened()
        return [] if log is None else log.touching(parts, below=below)

    def operation(self, number: int) -> Operation:
        """Return an operation; raises HistoryDamaged or LookupError."""
        log = self._opened()
        if log is None:
            raise LookupError("there is no log yet")
        try:
            return log.read(number)
        except (HistoryDamaged, LogDamaged, LookupError) as error:
            if isinstance(error, LookupError) and number not in self._lost:
                raise
            raise HistoryDamaged(
                f"The record of change {number} is damaged: it can be neither shown nor undone. The"
                " others are not affected"
            ) from error

    def operations(self, numbers: Iterable[int]) -> tuple[list[Operation], list[str]]:
        """Return what the log has of some numbers, and a sentence for each damaged one."""
        found, sentences = list[Operation](), list[str]()
        for number in numbers:
            try:
                found.append(self.operation(number))
            except HistoryDamaged as error:
                sentences.append(str(error))
            except LookupError:
                continue  # trimmed
        return found, sentences

    def readable(self, serials: Iterable[int]) -> Iterator[Operation]:
        """Yield some operations; skip trimmed and damaged ones."""
        for serial in serials:
            try:
                yield self.operation(serial)
            except HistoryDamaged as error:
                if serial not in self._logged:
                    self._logged.add(serial)
                    logger.error("%s", error)
            except LookupError:
                continue  # trimmed

    def calls(self, serials: Iterable[int]) -> Iterator[Committed]:
        """Yield what some operations say of their calls; skip trimmed and damaged ones."""
        return map(committed, self.readable(serials))

    def newest_of(self, call_id: str) -> int:
        """Return the newest operation of a call that is not damaged; else raises LookupError."""
        log = self._opened()
        for operation in self.readable([] if log is None else log.numbers_of(call_id)):
            return operation.number
        raise LookupError(f"the history has no call {call_id!r}")

    def redo(self, serial: int) -> Redo | None:
        """Return what a call's operation holds for its session; None for nothing."""
        log = self._opened()
        with contextlib.suppress(LookupError, TypeError, ValueError, HistoryDamaged, LogDamaged):
            text = None if log is None else log.read(serial).redo
            return None if text is None else Redo.decode(json.loads(text))
        return None

    def damaged(self, serials: Iterable[int] | None = None) -> dict[int, HistoryDamaged]:
        """Return the error of each damaged call, by default of all calls."""
        found: dict[int, HistoryDamaged] = {}
        for serial in self.serials() if serials is None else serials:
            try:
                self.operation(serial)
            except LookupError:
                continue
            except HistoryDamaged as error:
                found[serial] = error
        return found

    def lacks(self) -> str | None:
        """Return a sentence if the database has lost the newest calls; None if it has them.

        SQLite drops, without an error, what follows a damaged part of its journal.
        """
        log = self._opened()
        head = 0 if log is None else log.head()
        with contextlib.suppress(OSError, ValueError):
            known = int((self._store / _HEAD).read_bytes())
            if known > head:
                return (
                    f"{self._store / LOG} has lost its last changes, {head + 1} to {known}: by a"
                    " loss of power, damage or deletion. They can be neither shown nor undone; the"
                    " files of the directory are as they left them"
                )
        return None

    def look_again(self) -> None:
        """Read again which calls there are: other processes may have added and trimmed some."""
        self._summaries = None

    def refresh(self) -> None:
        """Look again, if anything has changed since the last time; for readers without the lock."""
        changed_at = self.changed_at()
        if changed_at != self._seen_at:
            self.look_again()
            self._seen_at = changed_at

    def changed_at(self) -> tuple[int, int]:
        """Return a value that differs after every commit and trim."""
        log = self._opened()
        return (0, 0) if log is None else log.position()

    def oldest_needed(self) -> int | None:
        """Return the call after which nothing may be removed; None if none is needed."""
        found = [serial for each in self.needed_by if (serial := each()) is not None]
        return min(found, default=None)

    def beyond(self, limits: Limits, now: float) -> Iterator[int]:
        """Yield the calls beyond some limits, oldest first, up to the oldest one still needed."""
        sizes = self._known()
        if self._total is None:
            self._total = sum(each.size for each in sizes.values())
        total, count = self._total, len(sizes)
        needed: float | None = None
        for serial, (*_, size, time) in sizes.items():
            if not limits.are_exceeded(total, count, partial(float, time), now):
                return
            if needed is None:  # asked only then: every commit comes here
                oldest = self.oldest_needed()
                needed = math.inf if oldest is None else oldest
            # That call itself stays, too: serials go on from the newest.
            if serial >= needed:
                return
            yield serial
            total, count = total - size, count - 1

    def unused(self) -> tuple[set[str], set[str]]:
        """Return the digests of the files that only removed operations needed, and of those that
        no operation has ever needed: a loss of power can have cost its rows.
        """
        log = self._opened()
        if log is None:
            return set(), set(self.objects)
        unneeded = set(self.objects) - log.needed()
        unused = unneeded & log.garbage()
        return unused, unneeded - unused

    def _known(self) -> dict[int, Summary]:
        if self._summaries is None:
            log = self._opened()
            found = [] if log is None else log.summaries()
            self._summaries = {} if log is None else dict(_with_lost(found, log))
            self._lost = self._summaries.keys() - {each.number for each in found}
            self._last = max(self._summaries, default=0)
        return self._summaries


def _with_lost(found: Sequence[Summary], log: Log) -> Iterator[tuple[int, Summary]]:
    """Yield operations by number, and with them those that a damaged database does not show.

    Each names the one before it; only the oldest are ever removed, and the log knows up to where.
    """
    last, head = log.removed, log.head()
    time = 0.0
    for each in found:
        if each.parent > last:
            yield each.parent, Summary(each.parent, "", last, 0, each.time)
        yield each.number, each
        last, time = each.number, each.time
    if head > last:
        yield head, Summary(head, "", last, 0, time)


def committed(operation: Operation) -> Committed:
    """Return what an operation says of its call."""
    call = operation.call
    assert call is not None
    paths = {join_path(path) for path, before, *_ in operation.changes if not _is_inside(before)}
    return Committed(
        serial=operation.number,
        call_id=call.id,
        tool=call.tool,
        time=call.started,
        paths=tuple(sorted(paths)),
        size=operation.size,
        undoes=operation.undone,
        partly=operation.partly,
    )


def _is_inside(before: Value | None) -> bool:
    """Whether something went with a directory that has a change of its own."""
    return before is not None and before.kind == "file" and before.content.startswith("@")


class History(Past):
    """The committed calls of a workspace; the oldest are trimmed to a size limit."""

    def __init__(
        self, store: Store, *, limits: Limits = HISTORY_LIMITS, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        super().__init__(store.path)
        self.store = store
        self.journal = Journal(store, self._head)
        self.unfinished: Callable[[], object] | None = None
        """Finishes an earlier transaction; called before the next one begins."""
        self.limits = limits
        self._clock = clock
        self._new: list[tuple[int, str]] = []
        """Size and digest of objects that are new since the workspace was opened."""
        self.own: set[int] = set()
        """The serials of what this process has committed."""
        self.is_in_doubt = False
        """Whether only the log can tell if the open transaction is committed."""
        self._gone: list[str] = []
        """What only removed operations named, and is removed, too."""
        self.interrupt: BaseException | None = None
        """What interrupted a commit that was made nevertheless."""
        self._head_fd = -1

    @property
    def log(self) -> Log:
        """The log, opened when it is first needed: calls that change nothing never do."""
        if self._log is not None and self._log_of == os.getpid():
            return self._log
        log = self._open(create=True, safe=self.store.safe)
        self._tell_what_is_lost(log)
        return log

    @property
    def contents(self) -> Contents:
        return Contents(self._store, self.log)

    def _opened(self) -> Log | None:
        if self._log is not None and self._log_of == os.getpid():
            return self._log
        return self.log if (self._store / LOG).exists() else None

    @property
    def _is_kept(self) -> bool:
        """Whether there is a history at all."""
        return self.limits.size > 0 or self.oldest_needed() is not None

    def _head(self) -> int:
        if not self._is_kept:
            return 0
        if self._log is not None and self._log.is_damaged:
            self._set_aside(LogDamaged(f"{self._log.path}: the database is malformed"))
        try:
            self.log.position()
            return self.log.head()
        except LogDamaged as error:
            self._set_aside(error)
            return self.log.head()

    def _known(self) -> dict[int, Summary]:
        try:
            return super()._known()
        except LogDamaged as error:
            self._set_aside(error)
            return super()._known()

    def _set_aside(self, error: LogDamaged) -> None:
        """Move a malformed database away: another one begins."""
        log, self._log = self._log, None
        if log is not None:
            _close_log(log, self._log_of)
        self.look_again()
        place = left_in(self._store, (LOG,))
        for suffix in ("-wal", "-shm", ""):  # last the database itself: a kill repeats this
            with contextlib.suppress(FileNotFoundError):
                os.rename(self._store / f"{LOG}{suffix}", f"{place}{suffix}")
        logger.error(
            "%s. It is set aside in %s, and a new log begins: the calls in it can no longer be"
            " undone. The files of the directory are not affected",
            error,
            place,
        )
        with contextlib.suppress(OSError):
            self._note_head(0)

    def _note_head(self, number: int) -> None:
        """Note the newest operation outside of the database, without waiting for the disk."""
        if self._head_fd < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
            self._head_fd = os.open(self._store / _HEAD, flags, 0o600)
        os.pwrite(self._head_fd, b"%020d\n" % number, 0)

    def _tell_what_is_lost(self, log: Log) -> None:
        with contextlib.suppress(LogUnavailable):  # whoever needs it says so
            lost = self.lacks()
            if lost is not None:
                logger.error("%s", lost)
                self._note_head(log.head())

    def close(self) -> None:
        """Close the journal and the log."""
        self.journal.close()
        fd, self._head_fd = self._head_fd, -1
        if fd >= 0:
            os.close(fd)
        log, self._log = self._log, None
        if log is not None:
            _close_log(log, self._log_of)

    def is_committed(self, first: Record) -> bool:
        """Tell whether a transaction with this first record is committed: the log decides that.

        Raises:
            LogUnavailable: It cannot be asked now.
            HistoryDamaged: It is not the log that it was when the transaction began.
        """
        log = self._opened()
        if log is not None and log.has(first.operation):
            return True
        if first.head > (0 if log is None else log.head()):
            raise HistoryDamaged(f"{self._store / LOG} lacks what it had when a call began")
        return False

    def look_again(self) -> None:
        super().look_again()
        self._total = None

    def catch_up(self) -> None:
        """Drop what other processes may have changed; one of them has finished what we had not."""
        self.journal.close()
        self.unfinished = None
        if self._log is not None and not self._log.is_at_its_path():
            self.close()  # another process has set a malformed one aside
        self.look_again()

    # Adding

    def add(
        self,
        records: Sequence[Record],
        call: ToolCall | None,
        after: Mapping[Parts, Entry | None],
        tree: Tree,
        undoes: Sequence[str] = (),
        contents: Mapping[str, bytes] | None = None,
        redo: MakeRedo | None = None,
        partly: Sequence[str] = (),
    ) -> int | None:
        """Commit. Returns the serial, or None if nothing is stored.

        ``after`` has the present entries at the changed paths. ``tree`` is the workspace, which may
        have scratch directories. ``undoes`` are the ids of the undone calls, ``partly`` those of
        which something is left. ``contents`` are to be kept, by digest. ``redo`` returns what the
        record holds for the session of the call.
        """
        if not [record for record in records if record.op in ("was", "moved")]:
            self.journal.cut(0)
            return None
        if not self._is_kept:
            self._trim()
            self.journal.cut(0)  # no history: dropping the journal is the commit
            return None
        first = records[0]
        try:
            serial, undone = self.log.last + 1, self._numbers_of(undoes)
        except LogDamaged as error:
            self._set_aside(error)
            raise
        self.own.add(serial)
        entries, size, linked = self._entries(records, tree)
        changes = changed(first.operation, records, entries, after, self.store.tree, tree, linked)
        kept = contents or {}
        lines = None if redo is None else redo()
        operation = Operation(
            id=first.operation,
            number=serial,
            parent=first.head,
            kind="undo" if undoes else "call",
            call=CallRecord(
                id=f"{'undo' if undoes else 'direct'}_{serial}" if call is None else call.id,
                tool="" if call is None else call.name,
                started=self._clock.time(),
            ),
            changes=changes.changes,
            undoes=undone,
            undone=tuple(undoes),
            partly=tuple(partly),
            times=changes.times,
            size=size + sum(map(len, kept.values())),
            moment=self._now_ns(),
            redo=None if lines is None else json.dumps(lines.encode()),
        )
        needs = {each.digest for each in entries.values() if each.digest and each.kind == "file"}
        self._decide(operation, (*changes.manifests, *kept.values()), needs)
        if self._summaries is not None:
            time = 0.0 if operation.call is None else operation.call.started
            self._summaries[serial] = Summary(
                serial, operation.id, operation.parent, operation.size, time
            )
            self._total = None if self._total is None else self._total + operation.size
        self._last = serial
        finish = partial(self._finish, records, entries)
        try:
            self._note_head(serial)
            finish()
        except OSError as error:
            # It is committed nevertheless.
            logger.warning("The originals of change %s will be kept later: %s", serial, error)
            self.unfinished = finish
            return None
        self._trim()
        if self._seen_at != _NEVER:  # no other process can have added anything meanwhile
            self._seen_at = _NEVER
            with contextlib.suppress(LogUnavailable):  # the call is committed
                self._seen_at = self.changed_at()
        return serial

    def _now_ns(self) -> int:
        """Return the time that a file would have now."""
        os.utime(self.store.tx_fd)
        return os.fstat(self.store.tx_fd).st_mtime_ns

    def _decide(
        self,
        operation: Operation,
        contents: Iterable[bytes],
        needs: Iterable[str],
    ) -> None:
        """Append an operation to the log: that is the commit point.

        Whether it is committed, the log alone says, whatever happens meanwhile.
        """
        rows = list(contents)
        large = [data for data in rows if len(data) > CONTENT_IN_ROW]
        stored = [self.objects.add(data, safe=self.store.safe) for data in large]
        log = self.log
        self.is_in_doubt = True  # until the commit ends: whatever interrupts it, the log is asked
        try:
            log.append(
                operation,
                contents=[data for data in rows if len(data) <= CONTENT_IN_ROW],
                needs=(*needs, *stored),
            )
        except BaseException as error:
            try:
                is_there = log.has(operation.id)
            except LogDamaged as damage:
                self._set_aside(damage)  # it decides nothing any more
                self.is_in_doubt = False
                raise
            if not is_there:
                self.is_in_doubt = False
                raise
            if not isinstance(error, LogUnavailable):
                self.interrupt = error

    def _numbers_of(self, call_ids: Iterable[str]) -> tuple[int, ...]:
        """Return the newest operation of each call; of one that is named twice the newest two."""
        known: dict[str, Iterator[int]] = {}
        found: list[int] = []
        for each in call_ids:
            numbers = known.setdefault(each, iter(self.log.numbers_of(each)))
            found += itertools.islice(numbers, 1)
        return tuple(sorted(found))

    def finish_earlier(self) -> None:
        """Finish an earlier transaction, or raise if that still fails."""
        if self.unfinished is not None:
            self.unfinished()
            self.unfinished = None

    def finish_committed(self, records: Sequence[Record]) -> None:
        """Finish a transaction that the log has, given its journal."""
        self.look_again()
        self._finish(records, self._displaced(records))

    def _displaced(self, records: Sequence[Record]) -> dict[int, Entry]:
        """Return the entries of what is still in the stash, by the numbers of their records."""
        # The commit has copied to the store what was in scratch directories elsewhere.
        records = [replace(each, scratch=None) for each in records]
        found = [*replaced(records, self.store.tree, self.store.tree)]
        found += _found_replaced(records)
        limit = self._limit
        entries: dict[int, Entry] = {}
        for index, entry, source in found:
            if entry.kind == "file":
                if entry.size > limit:
                    continue
                try:
                    entry = entry._replace(digest=entry.digest or self._digest(source, entry.size))
                except FileNotFoundError:
                    continue  # it is kept already
            entries[index] = entry
        return entries

    def _finish(self, records: Sequence[Record], entries: Mapping[int, Entry]) -> None:
        """Keep what a committed transaction displaced, and drop its journal. Idempotent."""
        edits = [index for index in sorted(entries) if records[index].in_place]
        # Files changed in place first: a removed file may be the same one.
        for index in [*edits, *(entries.keys() - edits)]:
            record, entry = records[index], entries[index]
            if entry.kind == "directory":
                # The files in it that were edited later through another hard link.
                edited = {entries[n].ino: entries[n] for n in reversed(edits) if n > index}
                self._settle_directory(record.saved or "", records[0].operation, edited)
            else:
                self._settle_file(record.source or Source(record.saved or ""), entry)
        self.journal.drop()

    def finish_last(self) -> None:
        """Keep what the last transaction displaced, if a loss of power has only cost its journal.

        Names in the stash are used again: a file there is recognised by its content.
        """
        if (operation := self._newest()) is None:
            return
        missing: set[str] = set()
        for change in operation.changes:
            before = change.before
            top, _, name = ("", "", "") if before is None else before.content.partition("/")
            if before is not None and before.is_directory and top == f"@{operation.id}":
                (name,) = checked_parts(name)[:1] if "/" not in name else ("",)
                if name and not (self._store / KEPT / operation.id / name).exists():
                    self._settle_directory(name, operation.id, {})
            elif before is not None and before.kind == "file" and before.content and not name:
                missing.add(before.content)
        contents = self.contents
        missing = {digest for digest in missing if not contents.has(digest)}
        for name, entry in self._in_stash() if missing else ():
            if entry.kind == "file" and entry.digest in missing:
                self._settle_file(Source(name), entry)

    def _newest(self) -> Operation | None:
        if not self._known():
            return None
        with contextlib.suppress(HistoryDamaged, LookupError):
            return self.operation(self.last)
        return None

    def _in_stash(self) -> Iterator[tuple[str, Entry]]:
        for name in self.store.tree.names(()):
            with contextlib.suppress(OSError):
                entry = capture(self.store.tree, (name,), read=True)
                if entry is not None:
                    yield name, entry

    def leftovers(self) -> set[str]:
        """Return the names in the stash of what a finished transaction has kept elsewhere."""
        if self.journal.path.exists() and self.journal.path.stat().st_size:
            return set()
        if self.limits.size <= 0:  # an empty journal is a commit
            return set(self.store.tree.names(()))
        if (operation := self._newest()) is None:
            return set()
        befores = [each.before for each in operation.changes if each.before is not None]
        links = {each.content for each in befores if each.kind == "link"}
        has_pipe = any(each.kind == "pipe" for each in befores)
        contents = self.contents
        return {
            name
            for name, entry in self._in_stash()
            if (entry.digest is not None and entry.kind == "file" and contents.has(entry.digest))
            or (entry.kind == "link" and entry.target in links)
            or (entry.pipe and has_pipe)
        }

    @property
    def _limit(self) -> int:
        """Larger files are not kept."""
        return self.limits.size if self.oldest_needed() is None else sys.maxsize

    def _entries(
        self, records: Sequence[Record], tree: Tree
    ) -> tuple[dict[int, Entry], int, list[tuple[str, str, int]]]:
        """Return the full entries that the records replaced, the bytes to be added, and the
        hard-linked files in removed directories: where each is, and its inode.
        """
        entries: dict[int, Entry] = {}
        linked: list[tuple[str, str, int]] = []
        total = 0
        limit = self._limit
        found = [*replaced(records, self.store.tree, tree, limit), *_found_replaced(records)]
        for index, entry, source in found:
            if entry.kind == "directory":
                inside = list(self.store.tree.walk((source.name,)))
                total += sum(each.st_size for _, each in inside)
                top: Parts = (source.name,)
                if records[index].scratch is not None:  # the store has a copy of it
                    place, top = saved_at(records[index], self.store.tree, tree)
                    inside = place.walk(top)
                linked += [
                    (source.name, "/".join(parts[len(top) :]), each.st_ino)
                    for parts, each in inside
                    if each.st_nlink > 1 and stat.S_ISREG(each.st_mode)
                ]
            elif entry.kind == "file" and entry.size <= limit:
                digest = entry.digest or self._digest(source, entry.size)
                total += 0 if digest in self.store.objects else entry.size
                entry = entry._replace(digest=digest)
            entries[index] = entry
        return entries, total, linked[:_LINKED]

    def _digest(self, source: Source, size: int) -> str:
        own = source.path(self.store.path, size)
        if own is None:
            return hashlib.sha256(source.read(self.store.path, size)).hexdigest()
        with Held(_open_own(own)) as fd:
            return digest_of(fd)

    def _settle_file(self, source: Source, entry: Entry) -> None:
        """Move the previous content of a file to the objects."""
        objects, own = self.store.objects, source.path(self.store.path)
        if entry.digest is None:
            return
        if may_compress(entry.size) and len(self._new) < COMPRESSED_AT_ONCE:
            self._new.append((entry.size, entry.digest))
        if own is None:
            objects.add(source.read(self.store.path, entry.size), safe=self.store.safe)
            return
        try:
            links = os.lstat(own).st_nlink
        except FileNotFoundError:
            return  # done in an earlier attempt
        # An existing object is replaced, because it may be damaged; but not by a file that was
        # changed since through another hard link: then a copy has its content.
        if entry.digest in objects and (
            links > 1 or self._digest(source, entry.size) != entry.digest
        ):
            return
        if links == 1:
            os.chmod(own, 0o600)
            objects.take(own, entry.digest)
            return
        # It may be changed through its other hard links.
        with Held(_open_own(own)) as fd:
            objects.add(fd, safe=self.store.safe)

    def _settle_directory(self, name: str, operation: str, edited: Mapping[int, Entry]) -> None:
        if self.store.tree.status((name,)) is not None:
            self._part_links(name, edited)
            trees = self.store.path / KEPT / operation
            trees.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.rename(name, trees / name, src_dir_fd=self.store.tx_fd)

    def _part_links(self, name: str, edited: Mapping[int, Entry]) -> None:
        """Separate files from their other hard links, through which they could still change."""
        tree = self.store.tree
        linked = [
            (parts, status.st_ino)
            for parts, status in tree.walk((name,))
            if stat.S_ISREG(status.st_mode) and (status.st_nlink > 1 or status.st_ino in edited)
        ]
        copies: dict[int, Parts] = {}
        for parts, ino in linked:
            staged = self.store.fresh()
            if ino in copies:
                with tree.parent(copies[ino]) as other:
                    link(other, copies[ino][-1], tree.fd, staged)
            elif ino in edited:
                self.make_file(edited[ino], tree, staged)
            else:
                copy_exactly(tree, parts, tree, (staged,))
            copies[ino] = parts
            with tree.parent(parts) as above:
                before = os.fstat(above)
                # One rename, so that the history always has the file.
                os.rename(staged, parts[-1], src_dir_fd=tree.fd, dst_dir_fd=above)
                os.utime(above, ns=(before.st_atime_ns, before.st_mtime_ns))

    def make_file(self, entry: Entry, tree: Tree, name: str) -> None:
        """Re-create a file at a free name; raises FileNotFoundError if it was not saved."""
        if entry.digest is None:
            raise FileNotFoundError(errno.ENOENT, "its content was not saved", name)
        with (
            Held(self.store.objects.open(entry.digest)) as reading,
            new_file(tree.fd, name) as writing,
        ):
            copy_content(reading, writing)
        apply_entry(tree, (name,), entry)

    # Trimming

    def _trim(self) -> None:
        """Remove the oldest entries beyond the limits, a bounded number at each commit.

        The call is already committed, so an error here does not fail it.
        """
        try:
            self._remove_beyond(self.limits, TRIMMED_AT_ONCE)
        except (OSError, LogUnavailable) as error:
            logger.warning("The history could not be trimmed; this will be retried: %s", error)

    def prune(self, limits: Limits) -> int:
        """Remove all calls beyond some limits at once; returns how many."""
        count = self._remove_beyond(limits, sys.maxsize)
        if (log := self._opened()) is not None:
            log.compact()
        return count

    def sweep(self) -> tuple[int, int]:
        """Remove what a kill has left of removed operations, and set aside what has no rows.

        Returns how many contents were removed, and how many things were set aside.
        """
        unused, unnamed = self.unused()
        for digest in unused:
            self.objects.remove(digest)
        for digest in unnamed:
            self._set_content_aside(digest)
        known, log = {each.id for each in self._known().values()}, self._opened()
        garbage = set[str]() if log is None else log.garbage()
        strays = set[str]()
        with contextlib.suppress(FileNotFoundError):
            strays = set(os.listdir(self._store / KEPT)) - known
        for name in strays:
            if name in garbage:
                remove_tree(self._store / KEPT / name)
            else:
                os.rename(self._store / KEPT / name, left_in(self._store, (name,)))
        if garbage and log is not None:
            log.remove((), gone=garbage)
        self._gone.clear()
        return len(unused), len(unnamed) + len(strays - garbage)

    def _set_content_aside(self, digest: str) -> None:
        place = left_in(self._store, (digest,))
        with (
            contextlib.closing(Tree(place.parent)) as folder,
            contextlib.suppress(ContentDamaged),
            Held(self.objects.open(digest)) as reading,
            new_file(folder.fd, place.name) as writing,
        ):
            copy_content(reading, writing)
            os.fsync(writing)  # it goes from the objects now
        self.objects.remove(digest)

    def _remove_beyond(self, limits: Limits, most: int) -> int:
        """Remove up to ``most`` calls, rows first: a kill leaves no call that lacks something.

        What it leaves of the rest, the next ``prune`` removes.
        """
        beyond = list(itertools.islice(self.beyond(limits, self._clock.time()), most))
        if not beyond:
            return 0
        for serial in beyond:
            keep(self.store.path, self.redo(serial))
        safe = self.store.safe or most == sys.maxsize
        garbage = self.log.remove(beyond, gone=self._gone, safe=safe)
        self._gone.clear()
        self.own.difference_update(beyond)
        self.look_again()
        for digest in garbage.contents:
            self.objects.remove(digest)
        for each in garbage.ids:
            remove_tree(self._store / KEPT / each)
        self._gone += (*garbage.contents, *garbage.ids)
        return len(beyond)

    # Compressing

    def compress_new(self) -> None:
        """Compress objects that are new since the workspace was opened, a bounded number.

        Not at commit: there an object is only a renamed file. Not for a store that syncs: that
        would take too long. `wink gc` compresses the others.
        """
        room = 0 if self.store.safe else COMPRESSED_BYTES
        try:
            for size, digest in self._new:
                room -= size
                if room < 0:
                    break
                self.store.objects.compress(digest)
        except OSError as error:
            logger.debug("Contents were not compressed: %s", error)
        self._new.clear()


COMPRESSED_AT_ONCE = 256
COMPRESSED_BYTES = 4 << 20
"""How many objects, and bytes of them, are compressed when a workspace is closed."""

LOG = "log.db"
"""The name of the log in a store."""
_HEAD = "head"
"""The name of the file with the number of the newest operation: it tells if the log has lost it."""
CONTENT_IN_ROW = 64 << 10
"""Bytes; larger contents are files."""
_of_parents: list[Log] = []
"""Logs that were open before a fork."""


def _close_log(log: Log, process: int) -> None:
    if process == os.getpid():
        log.close()


_LINKED = 1000
"""How many hard-linked files in removed directories a commit notes, to link them again."""
TRIMMED_AT_ONCE = 64
"""How many calls one commit may remove."""


def append_line(path: Path, line: bytes) -> None:
    """Add a line to a file, completely or not at all."""
    with Held(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)) as fd:
        size = os.fstat(fd).st_size
        try:
            write_all(fd, line + b"\n")
        except BaseException:
            os.ftruncate(fd, size)
            raise


def saved_at(record: Record, own: Tree, workspace: Tree) -> tuple[Tree, Parts]:
    """Return the tree and path of a saved file."""
    if record.scratch is None:
        return own, (record.saved or "",)
    return workspace, (*record.scratch, record.saved or "")


def replaced(
    records: Sequence[Record], own: Tree, workspace: Tree, hashed: int = -1
) -> Iterator[tuple[int, Entry, Source]]:
    """Yield index, entry and content of what each record replaced, newest first.

    Files of up to ``hashed`` bytes get a digest.
    """
    edited: dict[int, tuple[Entry, Source]] = {}
    firsts = _firsts(records)
    for index in reversed(range(len(records))):
        record = records[index]
        before = record.before
        if before is None or record.op != "was":
            continue
        if record.source is not None and record.after is not None:
            edited[before.ino] = before, record.source
            yield index, *edited[before.ino]
        elif record.saved is not None and firsts[record.saved] == index:
            read = before.kind == "file" and before.size <= hashed
            entry = capture(*saved_at(record, own, workspace), read=read)
            if entry is not None:
                # It may have been changed since through another hard link.
                known = edited.get(entry.ino) if entry.kind == "file" else None
                entry, source = known or (entry, Source(record.saved))
                yield index, entry._replace(ino=before.ino), source


def _found_replaced(records: Sequence[Record]) -> Iterator[tuple[int, Entry, Source]]:
    """Yield what other programs replaced."""
    for index, record in enumerate(records):
        if record.source is not None and record.after is None and record.before is not None:
            yield index, record.before, record.source


def _firsts(records: Sequence[Record]) -> dict[str | None, int]:
    """Return the first record of each saved file, by name."""
    firsts: dict[str | None, int] = {}
    for index, record in enumerate(records):
        if record.saved is not None:
            firsts.setdefault(record.saved, index)
    return firsts


def _open_own(path: str) -> int:
    """Open a saved file, even one without read permission."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, flags)
    except PermissionError:
        os.chmod(path, 0o600)
        return os.open(path, flags)


# Adopting


def adopt_store(
    root: str | os.PathLike[str], *, store: str | os.PathLike[str] | None = None
) -> tuple[str, ...]:
    """Seal the store of a workspace; returns a sentence for each damaged record.

    For a store that is damaged, or whose key is lost: wink cannot distinguish it from a planted
    one. Names that lead out of the store or workspace are never accepted. Sessions
    and ledgers are adopted by ``SavedSession.adopt`` and ``OutcomeLedger.adopt``.

    Raises:
        StoreRefused: It belongs to another user or contains links.
        WorkspaceLocked: The workspace is open elsewhere.
    """
    root = Path(os.path.realpath(root))
    path = store_of(root, store)
    with Held(open_store(path)) as fd:
        lock = ProcessLock(fd, root, wait=None, alone=True)
    try:
        if pids := present_in(root, store=path):
            # They would go on with the old seals.
            raise WorkspaceLocked(f"{root} is open in process {pids[0]}. Close it there", pids[0])
        return tuple(_adopt(root, path))
    finally:
        lock.close()


def _adopt(root: Path, path: Path) -> Iterator[str]:
    note = Note(id=os.urandom(8).hex(), path=str(root), ino=os.stat(root).st_ino)
    known = re.search(rb'"id": "([0-9a-f]{16})"', _read(path / "root"))
    before = None if known is None else known[1].decode()
    journals = [path / "tx" / "journal"]
    lines = {journal: _read(journal) for journal in journals}
    earlier = None if before is None else Seals(f"{JOURNAL} {before}")
    # If one seal is valid, all must be: only with a lost key are all invalid.
    strict = earlier is not None and any(_good(data, earlier) for data in lines.values())
    seals = note.seals(JOURNAL)
    for journal, data in lines.items():
        sealed, texts = b"", list(_texts(data, earlier if strict else None))
        for text in texts:
            sealed += b"damaged\n" if text is None else seals.sealed(text, len(sealed)) + b"\n"
        if None in texts or (data and not data.endswith(b"\n")):
            copy = left_in(path, (journal.name,))
            write_whole(copy, data)
            yield f"{journal} is damaged; its content is in {copy}"
        if data:
            write_whole(journal, sealed)
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
        noted = json.loads((path / NOTE).read_bytes()[SEAL_SIZE + 1 :])
        if all(checked_parts(base)[-1].startswith(TEMPORARY) for base, _ in noted):
            write_whole(path / NOTE, note.seals(NOTE).sealed(json.dumps(noted).encode()))
    write_note(path, note)


def _texts(data: bytes, strict: Seals | None) -> Iterator[bytes | None]:
    """Yield the text of each complete line, or None if it is damaged or invalid."""
    offset = 0
    for line in data.split(b"\n")[:-1]:
        mark, _, text = line.partition(b" ")
        good = len(mark) == SEAL_SIZE
        if strict is not None:
            good = strict.unsealed(line, offset) is not None
        offset += len(line) + 1
        try:
            if good:
                Record.decode(text)
        except (TypeError, ValueError):
            good = False
        yield text if good else None


def _good(data: bytes, seals: Seals) -> bool:
    return seals.unsealed(data.partition(b"\n")[0]) is not None


def _read(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError), open(path, "rb", opener=no_links) as file:
        return file.read()
    return b""
