"""The outcomes of calls that reach outside, so that none runs twice under one id.

Such a call cannot be rolled back, so its start is recorded before it runs, and its outcome when it
ends. A call without an outcome was killed: whether it took effect is asked, not guessed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from weakincentives.core import locks
from weakincentives.core.logs import get_logger
from weakincentives.core.state import Seals
from weakincentives.errors import OutcomeOnRecord, WinkError
from weakincentives.session.slices import SlicePolicy, slice_policy

if TYPE_CHECKING:
    from weakincentives.filesystem.redo import Redo

_logger = get_logger(__name__)

Outcome = Literal["started", "answered", "committed", "rolled_back", "compensated", "unknown"]
"""``started``: the call is running; of a killed process, its outcome is unknown.
``answered``: it took effect, and is committing the rest of its changes."""


@slice_policy(SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The outcome of a call that reaches outside, or its start."""

    call_id: str
    tool_name: str
    outcome: Outcome
    timestamp: float
    message: str = ""
    """The result as the model saw it."""
    files: bool = False
    """Whether it also changed files on disk, which are committed after it answered."""
    redo: str = ""
    """What the file of its session lacks until it is next saved: see ``recovery``."""


class OutcomeEntries(Protocol):
    """Where a ledger keeps its entries: the newest of each call."""

    @property
    def waits_for_save(self) -> bool:
        """Whether the next save of the session records how calls ended."""
        ...

    def find(self, call_id: str) -> CallOutcome | None:
        """Return the outcome of a call as it is now: its process may be gone."""
        ...

    def calls(self, prefix: str) -> list[CallOutcome]:
        """Return the outcomes of the calls whose ids begin like this, oldest first."""
        ...

    def change(
        self,
        call_id: str,
        decide: Callable[[CallOutcome | None], CallOutcome],
        *,
        running: bool | None = None,
    ) -> None:
        """Record what ``decide`` returns, given the outcome as it is now, atomically.

        It may be called more than once. ``running`` says that the call runs in this process from
        now on, or no longer.
        """
        ...

    def redos(self, session: str, size: int) -> list[Redo]: ...

    def damage(self) -> str:
        """Return what is wrong with them, if calls are refused because of it; else ``""``."""
        ...


class OutcomeLedger:
    """The outcomes of calls that reach outside, by call id; in a file when it has a path.

    A line that is damaged, or that this user did not write, makes the outcome of its call unknown;
    if its call cannot be identified, that of every call that is not on record. A person who has
    checked the file can :meth:`adopt` it.

    Args:
        path: An append-only file of sealed JSON lines, created when first needed.
        resolve: Asked about a call whose outcome is unknown: returns ``"committed"`` or
            ``"rolled_back"`` if it can find out, from the service for example, else None.
        entries: Where they are instead: those of a session in a database, for example, which are
            ``SavedSession.ledger``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        resolve: Callable[[CallOutcome], Outcome | None] | None = None,
        entries: OutcomeEntries | None = None,
    ) -> None:
        self.path = None if path is None else Path(path)
        self.resolve = resolve
        self._entries = entries or _Entries(self.path)

    @classmethod
    def at(cls, path: Path) -> OutcomeLedger:
        """Return the one ledger of a file in this process."""
        with _ledgers_lock:
            ledger = _ledgers.get(path)
            if ledger is None:
                ledger = _ledgers[path] = cls(path)
            _recent.pop(path, None)
            _recent[path] = ledger
            if len(_recent) > _MOST_RECENT:
                del _recent[next(iter(_recent))]
            return ledger

    def find(self, call_id: str) -> CallOutcome | None:
        """Return the outcome of a call; ``started`` if it is running, ``unknown`` if it was killed.

        One that was killed after it answered is ``committed``: it took effect.
        """
        return self._entries.find(call_id)

    def calls(self, prefix: str = "") -> tuple[CallOutcome, ...]:
        """Return the outcomes of the calls whose ids begin like this, oldest first."""
        return tuple(self._entries.calls(prefix))

    def redos(self, session: str, size: int) -> list[Redo]:
        """Return what the file of a session lacks of calls that took effect; ``size`` is its own.

        Those of calls under way are left out.
        """
        return self._entries.redos(session, size)

    def unsettled(self) -> tuple[CallOutcome, ...]:
        """Return the calls whose outcome is unknown."""
        return tuple(each for each in self.calls() if each.outcome == "unknown")

    def settle(self, call_id: str, outcome: Outcome) -> None:
        """Record the outcome of a call that was unknown."""
        if outcome not in ("committed", "rolled_back", "compensated"):
            raise ValueError(f"a call is settled as committed or rolled_back, got {outcome!r}")

        def settled(found: CallOutcome | None) -> CallOutcome:
            if found is None:
                raise WinkError(f"call {call_id!r} is not on record")
            return replace(found, outcome=outcome, files=False, redo="")

        self._entries.change(call_id, settled)

    def begin(
        self, call_id: str, tool_name: str, timestamp: float, *, may_repeat: bool = False
    ) -> CallOutcome | None:
        """Record that a call is about to run; refuse one that must not run again.

        With ``may_repeat``, a call whose outcome is unknown runs again: what was known of it is
        returned.
        """
        found = self.find(call_id)
        if found is not None and found.outcome == "unknown":
            self._ask(replace(found, tool_name=found.tool_name or tool_name))
        unknown: list[CallOutcome] = []

        def begun(found: CallOutcome | None) -> CallOutcome:
            unknown.clear()
            if found is not None and found.outcome == "unknown" and may_repeat:
                unknown.append(found)
            elif found is not None:
                refuse(replace(found, tool_name=found.tool_name or tool_name))
            return CallOutcome(call_id, tool_name, "started", timestamp)

        self._entries.change(call_id, begun, running=True)
        return unknown[0] if unknown else None

    def answer(self, outcome: CallOutcome) -> None:
        """Record the answer of a call that took effect, before the rest is committed."""
        if self._entries.waits_for_save:
            return  # one transaction records all of it
        self._entries.change(outcome.call_id, lambda _: replace(outcome, outcome="answered"))

    def end(self, outcome: CallOutcome) -> None:
        """Record the outcome of a call."""
        self._entries.change(outcome.call_id, lambda _: outcome, running=False)

    @classmethod
    def adopt(cls, path: str | os.PathLike[str]) -> tuple[str, ...]:
        """Seal a file that is damaged, or whose key is lost; returns what was lost.

        For a person who knows where the file comes from. Lines that cannot be read are only in
        the copy that is made next to it. No other process may be using the file.
        """
        return _Entries(Path(path)).adopt()

    def damage(self) -> str:
        """Return what is wrong with the file, if calls are refused because of it; else ``""``."""
        return self._entries.damage()

    def _ask(self, found: CallOutcome) -> None:
        """Settle a call whose outcome is unknown, if someone can be asked about it."""
        answer = None
        if self.resolve is not None:
            try:
                answer = self.resolve(found)
            except Exception:
                _logger.exception("resolving call %s failed; it stays unknown", found.call_id)
        if answer in ("committed", "rolled_back", "compensated"):
            self.settle(found.call_id, answer)
        elif answer not in (None, "unknown"):
            _logger.error("%r is no outcome for call %s; it stays unknown", answer, found)


def as_it_is(found: CallOutcome, *, is_under_way: bool) -> CallOutcome:
    """Return an outcome as of now: its process may be gone."""
    if found.outcome not in ("started", "answered"):
        return found
    if is_under_way:
        return replace(found, outcome="started")
    # A call that answered took effect, even if it was killed afterwards.
    return replace(found, outcome="committed" if found.outcome == "answered" else "unknown")


class _Entries:
    """Entries in memory, and in a file if there is a path."""

    waits_for_save = False

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._known: dict[str, CallOutcome] = {}
        self._redos: dict[str, tuple[str, int, int]] = {}
        """Of calls that took effect: whose session, how long its file is then, and where in this
        file that is."""
        # Calls under way in this process.
        self._running: set[str] = set()
        self._read = 0
        self._locks: _Locks | None = None
        self._depth = 0
        self._doubt = ""
        """What is wrong with the file, if the calls concerned cannot be identified."""

    def find(self, call_id: str) -> CallOutcome | None:
        with self._lock:
            self._catch_up()
            found = self._known.get(call_id)
            if found is None and self._doubt:
                return CallOutcome(call_id, "", "unknown", 0.0, self._doubt)
            return None if found is None else self._as_it_is(found)

    def calls(self, prefix: str) -> list[CallOutcome]:
        with self._lock:
            self._catch_up()
            found = (each for each in self._known.values() if each.call_id.startswith(prefix))
            return [self._as_it_is(each) for each in found]

    def change(
        self,
        call_id: str,
        decide: Callable[[CallOutcome | None], CallOutcome],
        *,
        running: bool | None = None,
    ) -> None:
        with self._lock, self._alone():
            outcome, place = decide(self.find(call_id)), 0
            if running:
                self._running.add(call_id)
                if self._locks is not None:
                    self._locks.take(call_id)
            try:
                if self.path is not None and self._locks is not None:
                    place = self._append(_text_of(outcome), self._locks)
                self._note(outcome, place)
            finally:
                if running is False:
                    self._running.discard(call_id)
                    if self._locks is not None:
                        self._locks.release(call_id)

    def redos(self, session: str, size: int) -> list[Redo]:
        from weakincentives.filesystem.redo import Redo

        found: list[Redo] = []
        with self._lock:
            self._catch_up()
            for call_id, (owner, end, place) in self._redos.items():
                if owner != session or end <= size or self._is_under_way(call_id):
                    continue
                assert self.path is not None
                line = _read_file(self.path, place).partition(b"\n")[0]
                text = Seals(_SEAL).unsealed(line, place)
                if text is not None:
                    found.append(Redo.decode(json.loads(json.loads(text)["redo"])))
        return found

    def damage(self) -> str:
        with self._lock:
            self._catch_up()
            return self._doubt

    def adopt(self) -> tuple[str, ...]:
        from weakincentives.filesystem.store import write_whole

        assert self.path is not None
        path = self.path
        with self._lock, self._alone():
            data = _read_file(path)
            entries, lost = _readable(data)
            copy = path.with_name(f"{path.name}.before-{os.urandom(4).hex()}")
            write_whole(copy, data)
            sealed, seals = b"", Seals(_SEAL)
            for entry in entries:
                sealed += seals.sealed(entry, len(sealed)) + b"\n"
            write_whole(path, sealed)
            if self._locks is not None:
                self._locks.note_size(len(sealed))
        return tuple(f"line {number} of {copy} cannot be read" for number in lost)

    def _as_it_is(self, found: CallOutcome) -> CallOutcome:
        is_open = found.outcome in ("started", "answered")
        return as_it_is(found, is_under_way=is_open and self._is_under_way(found.call_id))

    def _is_under_way(self, call_id: str) -> bool:
        if call_id in self._running:
            return True
        if self._locks is None and self.path is not None and self._lock_file.exists():
            self._locks = _Locks(self._lock_file)
        return self._locks is not None and self._locks.is_taken(call_id)

    @property
    def _lock_file(self) -> Path:
        assert self.path is not None
        return self.path.with_name(self.path.name + ".lock")

    @contextmanager
    def _alone(self) -> Generator[None]:
        """Lock out other processes between reading and appending."""
        if self.path is None or self._depth:
            yield
            return
        if self._locks is None:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._locks = _Locks(self._lock_file)
        self._locks.take("")
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._locks.release("")

    def _note(self, outcome: CallOutcome, place: int) -> None:
        """Note an entry of the file that begins at a place."""
        if outcome.redo and self.path is not None:
            redo = json.loads(outcome.redo)
            self._redos[outcome.call_id] = redo["session"], redo["end"], place
            outcome = replace(outcome, redo="")
        elif outcome.outcome not in ("answered", "committed"):
            self._redos.pop(outcome.call_id, None)
        self._known[outcome.call_id] = outcome

    def _append(self, text: bytes, locks_: _Locks) -> int:
        """Append a line, and sync it: the call reaches outside next. Returns where it begins."""
        assert self.path is not None
        fd = os.open(self.path, locks.OWN_FILE, 0o600)
        try:
            # A line that a kill cut short was not synced, so its call did not begin.
            os.ftruncate(fd, self._read)
            line = b""
            if self._read < locks_.noted_size():
                line = Seals(_SEAL).sealed(b'{"lost": true}', self._read) + b"\n"
            place = self._read + len(line)
            line += Seals(_SEAL).sealed(text, place) + b"\n"
            os.lseek(fd, self._read, os.SEEK_SET)
            written = 0
            while written < len(line):
                written += os.write(fd, line[written:])
            os.fsync(fd)
        finally:
            os.close(fd)
        if not self._read:
            _sync_directory(self.path.parent)
        self._read += len(line)
        locks_.note_size(self._read)
        return place

    def _catch_up(self) -> None:
        """Read the lines that were appended since, by this process or another."""
        if self.path is None:
            return
        if self._locks is None and self._lock_file.exists():
            self._locks = _Locks(self._lock_file)
        noted, lines = self._look()
        if self._locks is not None and any(text is None for _, text in lines):
            # Another process may be replacing a line that a kill cut short: read again, locked.
            with self._alone():
                noted, lines = self._look()
        for number, (line, text) in enumerate(lines, 1):
            if text is None and number == len(lines) and 0 < noted <= self._read:
                break  # a power cut left half of it: it was never synced
            place = self._read
            self._read += len(line) + 1
            self._take_in(line, text, place)
        if self._read < noted:
            self._note_doubt("its end is missing")

    def _look(self) -> tuple[int, list[tuple[bytes, bytes | None]]]:
        """Return the least size of the file, and the new lines, each with its unsealed text."""
        assert self.path is not None
        noted = 0 if self._locks is None else self._locks.noted_size()  # first: the file only grows
        data, place = _read_file(self.path, self._read), self._read
        lines: list[tuple[bytes, bytes | None]] = []
        if data:
            seals = Seals(_SEAL)
            for line in data.split(b"\n")[:-1]:
                lines.append((line, seals.unsealed(line, place)))
                place += len(line) + 1
        return noted, lines

    def _take_in(self, line: bytes, text: bytes | None, place: int) -> None:
        entry: dict[str, Any] = {} if text is None else json.loads(text)
        if "lost" in entry:
            self._note_doubt("its end was missing")
        elif text is not None:
            entry.pop("mark", None)
            self._note(CallOutcome(**entry), place)
        elif (call_id := _call_of(line)) is not None:
            _logger.error("an entry of %s is damaged: call %s is unknown", self.path, call_id)
            earlier = self._known.get(call_id) or CallOutcome(call_id, "", "unknown", 0.0)
            self._note(replace(earlier, outcome="unknown"), place)
        else:
            self._note_doubt(f"the line up to byte {self._read} is damaged, or not ours")

    def _note_doubt(self, what: str) -> None:
        if not self._doubt:
            self._doubt = f"{self.path} is damaged: {what}"
            _logger.error(
                "%s. Calls that reach outside and are not on record are refused until you adopt"
                " it: `wink doctor --adopt-store`, or OutcomeLedger.adopt",
                self._doubt,
            )


_SEAL = "outcomes"
_MARK = "call of an outcome"
_SIZE = "size of outcomes"
_CALL = re.compile(rb'"call_id": ("(?:[^"\\\\]|\\\\.)*")')
_MARKED = re.compile(rb'"mark": "([0-9a-f]+)"')


def _call_of(line: bytes) -> str | None:
    """Return the call of a damaged line, if its mark still proves it; else None."""
    call, mark = _CALL.search(line), _MARKED.search(line)
    if call is None or mark is None:
        return None
    try:
        call_id = json.loads(call[1])
        data = call_id.encode("utf-8", "surrogatepass")
    except ValueError:
        return None
    return call_id if Seals(_MARK).seal(data).encode() == mark[1] else None


def _readable(data: bytes) -> tuple[list[bytes], list[int]]:
    """Return the entries of a file, sealed or not, and the numbers of damaged lines.

    If one seal is valid, the others must be: without the key none is.
    """
    lines = data.split(b"\n")
    places = [0, *accumulate(len(line) + 1 for line in lines)]
    texts = [Seals(_SEAL).unsealed(line, place) for line, place in zip(lines, places, strict=False)]
    strict = any(text is not None for text in texts)
    entries: list[bytes] = []
    lost: list[int] = []
    for number, (line, text) in enumerate(zip(lines, texts, strict=True), 1):
        if not line:
            continue
        if text is None and (line.startswith(b"{") or not strict):
            text = line if line.startswith(b"{") else line[33:]
        try:
            entry = json.loads(text or b"")
            if "lost" not in entry:
                entry.pop("mark", None)
                entries.append(_text_of(CallOutcome(**entry)))
        except (ValueError, TypeError, AttributeError):
            if (call_id := _call_of(line)) is not None:
                entries.append(_text_of(CallOutcome(call_id, "", "unknown", 0.0)))
            lost.append(number)
    return entries, lost


def _text_of(outcome: CallOutcome) -> bytes:
    """Return an entry to seal; its mark identifies the call if the rest is damaged."""
    mark = Seals(_MARK).seal(outcome.call_id.encode("utf-8", "surrogatepass"))
    fields = asdict(outcome)
    if not outcome.redo:
        del fields["redo"]
    return json.dumps({**fields, "mark": mark}).encode()


def _read_file(path: Path, start: int = 0) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:
        return b""
    with open(fd, "rb") as file:
        file.seek(start)
        return file.read()


def _sync_directory(path: Path) -> None:
    with suppress(OSError):  # not every system has this
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class _Locks:
    """Locks by name, and the least size of the ledger's file.

    The system releases them when their process ends. Each name locks one byte of one file, so that
    calls leave no files behind. On a system without such locks they do nothing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open()

    def _open(self) -> None:
        self._pid, self._fd = os.getpid(), os.open(self._path, locks.OWN_FILE, 0o600)
        locks.keep_from_forks(self._fd)
        weakref.finalize(self, _close, self._pid, self._fd)

    @property
    def _file(self) -> int:
        if self._pid != os.getpid():  # a forked child has locks of its own
            self._open()
        return self._fd

    def take(self, name: str) -> None:
        locks.take(self._file, byte=_byte(name), wait=True)

    def release(self, name: str) -> None:
        locks.release(self._file, byte=_byte(name))

    def is_taken(self, name: str) -> bool:
        return locks.is_taken(self._file, byte=_byte(name))

    def note_size(self, size: int) -> None:
        """Note the size of the ledger's file: if it is smaller later, lines are missing."""
        note = Seals(_SIZE).sealed(b"%020d" % size)
        os.lseek(self._file, 0, os.SEEK_SET)
        os.write(self._file, note)

    def noted_size(self) -> int:
        """Return the noted size of the file; 0 without a valid note."""
        os.lseek(self._file, 0, os.SEEK_SET)
        noted = Seals(_SIZE).unsealed(os.read(self._file, 100))
        return 0 if noted is None else int(noted)


def _close(pid: int, fd: int) -> None:
    if pid == os.getpid():
        locks.close(fd)


def _byte(name: str) -> int:
    # Zero is the ledger as a whole. Two names on one byte only wait for each other.
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big") + 1 if name else 0


_ledgers: weakref.WeakValueDictionary[Path, OutcomeLedger] = weakref.WeakValueDictionary()
_recent: dict[Path, OutcomeLedger] = {}
"""The ledgers used last stay open, so that a file is not read again for every call; the others are
closed, so that a process does not keep a descriptor for every workspace it ever had."""
_MOST_RECENT = 16
_ledgers_lock = threading.Lock()


def refuse(found: CallOutcome) -> None:
    """Refuse a call that took effect or may have; one that was undone may run again."""
    call = f"call {found.call_id} to tool '{found.tool_name}'"
    if found.outcome == "committed":
        answer = f" It answered: {found.message}" if found.message else ""
        raise OutcomeOnRecord(
            f"{call} has taken effect already and is not run twice.{answer}",
            code="ALREADY_COMMITTED",
        )
    if found.outcome == "started":
        raise OutcomeOnRecord(f"{call} is under way", code="ALREADY_STARTED")
    if found.outcome == "unknown":
        why = f" ({found.message})" if not found.timestamp and found.message else ""
        raise OutcomeOnRecord(
            f"It is not known whether {call} took effect, so it is not run again{why}",
            code="OUTCOME_UNKNOWN",
            suggestions=("Find out what happened, then settle it in the ledger",),
        )
