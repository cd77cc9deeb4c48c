"""How calls that reach outside ended: on record, so that none is run twice under one id.

What such a call did cannot be rolled back, so before it runs that is written down, and when it
ends how. A call whose end is missing was killed: whether it took effect is asked, not guessed.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from weakincentives.errors import OutcomeOnRecord, WinkError
from weakincentives.logs import get_logger
from weakincentives.slices import SlicePolicy, slice_policy

try:
    import fcntl
except ImportError:  # Windows: calls of one id in two processes at once are not told apart
    fcntl = None

__all__ = ["CallOutcome", "Outcome", "OutcomeLedger"]

_logger = get_logger(__name__)

Outcome = Literal["started", "answered", "committed", "rolled_back", "compensated", "unknown"]
"""``started`` is on record while a call runs; left behind by a killed process, it is unknown.
``answered`` is on record while a call that took effect commits the rest of what it changed."""


@slice_policy(SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class CallOutcome:
    """How a call that reaches outside ended, or that it has begun."""

    call_id: str
    tool_name: str
    outcome: Outcome
    timestamp: float
    message: str = ""
    """What the model was told."""
    files: bool = False
    """Whether it changed files on disk as well, which are committed after this was answered."""


class OutcomeLedger:
    """The outcomes of calls that reach outside, by call id; in a file when it has a path.

    Args:
        path: An append-only file of JSON lines; it is made when first needed.
        resolve: Asked about a call whose outcome is unknown: returns ``"committed"`` or
            ``"rolled_back"`` when it can be found out, at the service for example, else None.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        resolve: Callable[[CallOutcome], Outcome | None] | None = None,
    ) -> None:
        self.path = None if path is None else Path(path)
        self._resolve = resolve
        self._lock = threading.RLock()
        self._known: dict[str, CallOutcome] = {}
        # What this process has begun is not unknown: it is under way.
        self._running: set[str] = set()
        self._read = 0
        self._locks: _Locks | None = None

    @classmethod
    def at(cls, path: Path) -> OutcomeLedger:
        """Return the one ledger of a file in this process."""
        with _ledgers_lock:
            ledger = _ledgers.get(path)
            if ledger is None:
                ledger = _ledgers[path] = cls(path)
            return ledger

    def find(self, call_id: str) -> CallOutcome | None:
        """Return how a call ended; one that has begun and is not under way is ``unknown``."""
        with self._lock:
            self._catch_up()
            found = self._known.get(call_id)
            if found is None or found.outcome not in ("started", "answered"):
                return found
            if self._is_under_way(call_id):
                return replace(found, outcome="started")
            if found.outcome == "answered":
                return found
            return CallOutcome(
                found.call_id, found.tool_name, "unknown", found.timestamp, found.message
            )

    def unsettled(self) -> tuple[CallOutcome, ...]:
        """Return the calls of which nobody knows whether they took effect."""
        with self._lock:
            self._catch_up()
            found = [self.find(call_id) for call_id in self._known]
        return tuple(each for each in found if each is not None and each.outcome == "unknown")

    def settle(self, call_id: str, outcome: Outcome) -> None:
        """Put on record what was found out about a call whose outcome was unknown."""
        if outcome not in ("committed", "rolled_back", "compensated"):
            raise ValueError(f"a call is settled as committed or rolled_back, got {outcome!r}")
        found = self.find(call_id)
        if found is None:
            raise WinkError(f"there is no call {call_id!r} on record")
        self._add(CallOutcome(call_id, found.tool_name, outcome, found.timestamp, found.message))

    def begin(self, call_id: str, tool_name: str, timestamp: float) -> None:
        """Put on record that a call is about to run; refuse one that must not run again."""
        with self._lock, self._alone():
            found = self.find(call_id)
            if found is not None and found.outcome == "unknown":
                found = self._ask(found)
            if found is not None:
                _refuse(found)
            self._running.add(call_id)
            if self._locks is not None:
                self._locks.take(call_id)
            self._add(CallOutcome(call_id, tool_name, "started", timestamp))

    def answer(self, outcome: CallOutcome) -> None:
        """Put on record what a call that took effect answers, before the rest is committed."""
        self._add(replace(outcome, outcome="answered"))

    def end(self, outcome: CallOutcome) -> None:
        """Put on record how a call ended."""
        with self._lock:
            known = self._known.get(outcome.call_id)
            was_answered = known is not None and known.outcome == "answered"
            # After a power cut, that it was answered tells as much.
            self._add(outcome, sync=not (was_answered and outcome.outcome == "committed"))
            self._running.discard(outcome.call_id)
            if self._locks is not None:
                self._locks.release(outcome.call_id)

    def _is_under_way(self, call_id: str) -> bool:
        if call_id in self._running:
            return True
        return self._locks is not None and self._locks.are_held_elsewhere(call_id)

    @contextmanager
    def _alone(self) -> Generator[None]:
        """Keep other processes from beginning a call between a look and an entry."""
        if self.path is None:
            yield
            return
        if self._locks is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._locks = _Locks(self.path.with_name(self.path.name + ".lock"))
        self._locks.take("")
        try:
            yield
        finally:
            self._locks.release("")

    def _ask(self, found: CallOutcome) -> CallOutcome:
        answer = None
        if self._resolve is not None:
            try:
                answer = self._resolve(found)
            except Exception:
                _logger.exception("asking about call %s failed; it stays unknown", found.call_id)
        if answer not in ("committed", "rolled_back", "compensated"):
            if answer not in (None, "unknown"):
                _logger.error("%r says nothing about call %s; it stays unknown", answer, found)
            return found
        self.settle(found.call_id, answer)
        return cast("CallOutcome", self.find(found.call_id))

    def _add(self, outcome: CallOutcome, *, sync: bool = True) -> None:
        with self._lock:
            if self.path is not None:
                line = json.dumps(asdict(outcome), ensure_ascii=False) + "\n"
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("ab") as file:
                    # A line that a kill cut short must not swallow this one.
                    torn = file.tell() and not _ends_a_line(self.path)
                    file.write(b"\n" * bool(torn) + line.encode())
                    file.flush()
                    # It says what happens outside: it must be on disk before that does.
                    if sync:
                        os.fsync(file.fileno())
            self._known[outcome.call_id] = outcome

    def _catch_up(self) -> None:
        """Read what the file has got since, from this process or another."""
        if self.path is None:
            return
        try:
            with self.path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data.rfind(b"\n") + 1
        self._read += whole
        for line in data[:whole].splitlines():
            try:
                entry: dict[str, Any] = json.loads(line)
                self._known[entry["call_id"]] = CallOutcome(**entry)
            except (ValueError, TypeError, KeyError):
                _logger.warning("a line of %s cannot be read and is left out", self.path)


class _Locks:
    """Locks by name between processes. The system lets go of them when their process ends.

    Record locks of one file, a byte for each name, so that no file is left for each call. They do
    nothing between threads, nor where the system has none.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        weakref.finalize(self, os.close, self._file)

    def take(self, name: str) -> None:
        if fcntl is not None:
            fcntl.lockf(self._file, fcntl.LOCK_EX, 1, _byte(name))

    def release(self, name: str) -> None:
        if fcntl is not None:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _byte(name))

    def are_held_elsewhere(self, name: str) -> bool:
        if fcntl is None:
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _byte(name))
        except OSError:
            return True
        self.release(name)
        return False


def _byte(name: str) -> int:
    # Zero is for the ledger as a whole; two names on one byte would only wait for each other.
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big") + 1 if name else 0


_ledgers: dict[Path, OutcomeLedger] = {}
_ledgers_lock = threading.Lock()


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _refuse(found: CallOutcome) -> None:
    """Refuse a call that has taken effect or may have; what was taken back may run again."""
    call = f"call {found.call_id} to tool '{found.tool_name}'"
    if found.outcome in ("answered", "committed"):
        told = f" It answered: {found.message}" if found.message else ""
        raise OutcomeOnRecord(
            f"{call} has taken effect already and is not run twice.{told}", code="ALREADY_COMMITTED"
        )
    if found.outcome == "started":
        raise OutcomeOnRecord(f"{call} is under way", code="ALREADY_STARTED")
    if found.outcome == "unknown":
        raise OutcomeOnRecord(
            f"It is not known whether {call} took effect, so it is not run again",
            code="OUTCOME_UNKNOWN",
            suggestions=("Find out what happened, then settle it in the ledger",),
        )
