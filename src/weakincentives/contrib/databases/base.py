"""What all databases share: a transaction for each call that asks, a savepoint for each nested one.

A call gets a view of the database. Its first statement begins a transaction on a connection of its
own. Views of nested calls share that connection; each is a savepoint. The pipeline merges or
discards every view, so a handler neither commits nor rolls back.
"""
# The classes of this package are one mechanism:
# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
import itertools
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from weakincentives.contrib.databases.noted import remember
from weakincentives.core.call import current_view, new_id, transaction_under_way
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.logs import get_logger
from weakincentives.errors import ResourceError, ViewClosed, WinkError
from weakincentives.filesystem import Branch, HostFilesystem
from weakincentives.session.participant import Participant

if TYPE_CHECKING:
    from weakincentives.contrib.databases.row_log import RowLog
    from weakincentives.runtime.rows import CallRows, KeptCall, RowChange, UndoneRows

_logger = get_logger(__name__)

NOT_YOURS = "the call commits and rolls back by itself: leave out COMMIT, ROLLBACK and BEGIN"
_COMMITTED = "rows of {}: a statement of the handler has committed them"
_names = itertools.count(1)
_STOPS_WITHIN = 2.0
"""Seconds for a statement to stop that an abandoned handler is running."""


class Work(ABC):
    """A transaction on one connection, shared by the views of a call and of its nested calls."""

    outer: Database
    """The view of the call; those of nested calls are forked from it."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.lock = threading.RLock()
        """Held during each statement."""
        self.lost_race = False
        self.is_over = False
        self.was_committed = False
        """Whether a statement of the handler has ended the transaction, so that its rows stay."""
        self.is_abandoned = False
        """Whether a handler that could not be stopped has to clean up."""
        self.call_id = ""
        """The call whose rows are recorded; empty for a block outside of calls."""
        self.session_id = self.tool = ""
        self.workspace = ""
        """The workspace in which it is listed."""
        self.undoes: Sequence[str] = ()
        """The calls whose rows it undoes."""
        self.is_recorded = False
        self.is_recursive = False
        self.keep: Callable[[], KeptCall | None] | None = None
        """Returns what to keep of the call until its session is saved."""

    def view(self) -> Database:
        """Return the view that a statement on the connection itself belongs to."""
        found = current_view(self.database)
        return found if found._work is self else self.outer

    @abstractmethod
    def begin(self, view: Database) -> None:
        """Begin the transaction; raise, and set ``lost_race``, if another one is in the way."""

    @abstractmethod
    def run(self, statement: str) -> None:
        """Run a statement for savepoints."""

    @abstractmethod
    def ask(self, statement: str, /, **parameters: Any) -> list[Sequence[Any]]:
        """Run a statement of ours with ``:named`` parameters, and return its rows."""

    @abstractmethod
    def restrict(self, view: Database) -> None:
        """Have the database refuse writes, or allow them again, as the view demands."""

    @abstractmethod
    def commit(self) -> None: ...

    @abstractmethod
    def rollback(self) -> None: ...

    @abstractmethod
    def interrupt(self) -> None:
        """Stop the statement that another thread is running."""

    @abstractmethod
    def close(self, *, reuse: bool) -> None:
        """Release the connection and all locks. May be called again."""

    def expect(self, statement: str) -> None:
        """Prepare for a statement of the handler: SQLite tells triggers of what a REPLACE removes.

        With this, triggers are recursive: those of many tables may not be.
        """
        log = self.database._log
        replaces = self.is_recorded and log is not None and log.dialect.replaces(statement)
        if replaces != self.is_recursive:
            self.is_recursive = replaces
            self.run(f"PRAGMA recursive_triggers={int(replaces)}")

    def hold(self) -> bool:
        """Enter the lock, stopping a statement of an abandoned handler; False if it goes on."""
        if self.lock.acquire(blocking=False):
            return True
        until = SYSTEM_CLOCK.monotonic() + _STOPS_WITHIN
        while SYSTEM_CLOCK.monotonic() < until:
            self.interrupt()
            if self.lock.acquire(timeout=0.02):
                return True
        return False

    def end(self, *, reuse: bool = True) -> None:
        self.is_over = True
        self.close(reuse=reuse)


class Database(Participant, ABC):
    """A database whose changes are committed or rolled back with each call.

    In a handler, ``context.resources.get`` returns the call's view, and so does a reference to the
    database itself. Elsewhere, use ``transaction``.
    """

    commits_last = True
    in_call_order = True
    _parent: Database | None = None
    """What this view was forked from; None in the database itself."""
    _work: Work | None = None
    _has_begun = False
    _savepoint = ""
    _inner: Database | None = None
    """The view of a nested call that has begun and not ended."""

    def __init__(self, *, patience: float = 30.0) -> None:
        if not patience > 0:
            raise ValueError(f"patience must be positive seconds, got {patience!r}")
        self.patience = patience
        self._lock = threading.RLock()
        self._commits = [0]
        """How many transactions were committed; one list for the database and its views."""
        self.workspace = ""
        """The workspace whose calls are listed and undone; empty for those of all."""
        self._log: RowLog | None = None

    @property
    def title(self) -> str:
        """Its name for people."""
        return type(self).__name__

    @property
    def address(self) -> Mapping[str, str] | None:
        """What another process needs to open it, without a password; None if none can."""
        return None

    @property
    def _row_log(self) -> RowLog:
        """What it records of calls; shared with its views."""
        if self._log is None:
            raise ResourceError(f"rows are recorded on SQLite and PostgreSQL, not on {self.title}")
        return self._log

    # What calls changed

    @property
    def may_record(self) -> bool:
        """Whether rows may be recorded, as far as is known without asking the database."""
        return self._log is not None and self._log.is_there is not False

    def record_calls(self) -> None:
        """Have each call that may write leave its id here, in the same transaction.

        Creates two small tables, unless they are there. So a process that is killed between this
        database's commit and the next one finds out what became of the call.
        """
        self._row_log.create(self)

    def track(self, *tables: str) -> None:
        """Record the rows of tables that calls change, so that they can be undone.

        Creates triggers, and the tables of ``record_calls``. Call it again when the columns of a
        table have changed, or there are new tables: at every start, for example.

        Raises:
            ResourceError: A table does not exist, or has no primary key.
        """
        self._row_log.create(self, tables)

    def has_committed(self, call_id: str) -> bool:
        """Whether a call has committed here; for calls since ``record_calls``."""
        return self._row_log.has(self, call_id)

    def kept(self, session: str) -> Sequence[KeptCall]:
        """Return what is kept here for a session, oldest first."""
        return self._row_log.kept(self, session)

    def settle(self, kept: KeptCall) -> None:
        """Forget what is kept of a call."""
        self._row_log.settle(self, kept)

    @property
    def records_every_table(self) -> bool:
        """Whether no call can change rows here without a record."""
        return self._row_log.records_every_table(self)

    def calls(self) -> Sequence[CallRows]:
        """Return the calls that committed here, oldest first."""
        return self._row_log.calls(self)

    def changes(self, call_ids: Iterable[str]) -> Mapping[str, Sequence[RowChange]]:
        """Return the rows that calls changed, by call."""
        return self._row_log.changes(self, call_ids)

    def undo(
        self,
        call_ids: Sequence[str],
        *,
        call_id: str = "",
        force: bool = False,
        dry_run: bool = False,
    ) -> UndoneRows:
        """Undo the rows of some calls and nothing else; see ``RowHistory``.

        Raises:
            RowUndoRefused: A foreign key or another rule of the database is in the way.
        """
        own = call_id or f"undo_{new_id()[:12]}"
        return self._row_log.undo(self, call_ids, call_id=own, force=force, dry_run=dry_run)

    def forget(self, days: float) -> int:
        """Delete what is recorded of calls older than so many days; returns how many calls."""
        return self._row_log.forget(self, 86_400 * days)

    @abstractmethod
    def _new_work(self) -> Work: ...

    def execute(self, statement: Any, parameters: Any = None, /) -> Any:
        """Run a statement in the call's transaction."""
        raise NotImplementedError

    def close(self) -> None:
        """Close idle connections. Calls under way go on."""

    def __copy__(self) -> Self:
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        return made

    # Outside calls

    @contextmanager
    def transaction(self, *, read_only: bool = False) -> Generator[Self]:
        """Return a view that is committed at the end of the block, or rolled back if it raises.

        Within a call, the block is a savepoint of the call's transaction.
        """
        base = self if self._parent is not None else current_view(self)
        view = base.fork()
        if read_only:
            view.read_only = "the transaction is read-only"
        try:
            yield view
            view.seal("the transaction has ended")
            base.merge(view)
        except BaseException:  # an interrupted block leaves no row
            view.seal("the transaction has ended")
            base.discard(view)
            raise

    def _here(self) -> Self:
        """Return the view that a statement belongs to."""
        if self._parent is not None:
            return self
        view = current_view(self)
        if view is self:
            name = type(self).__name__
            raise WinkError(
                f"{name} is used outside a call that has it among its resources: use "
                "`with database.transaction() as db:`"
            )
        return view

    # In a call

    @contextmanager
    def _using(self) -> Generator[Any]:
        """Yield the call's transaction, begun, for one statement."""
        work = self._work
        assert work is not None
        self.check_open("a statement")
        with work.lock:
            try:
                self._enter()
                yield work
            finally:
                if work.is_abandoned and not work.is_over:
                    self._clean_up(work)

    def _enter(self) -> None:
        """Begin the transaction or savepoint, unless that is done; the lock is held."""
        work, parent = self._work, self._parent
        assert work is not None
        assert parent is not None
        self.check_open("a statement")
        if work.is_over:
            raise ViewClosed("the transaction of the call has ended")
        if self._inner is not None:
            raise WinkError(
                "a nested call is using the database: wait until it has ended, or use its context"
            )
        if not self._has_begun:
            if parent._work is None:
                work.begin(self)
                if work.call_id and self.read_only is None and self._log is not None:
                    work.is_recorded = self._log.begin(work, self._tell_workspace)
                if self._sealed is not None:  # while it waited
                    work.rollback()
                    work.end()
                    self.check_open("a statement")
            else:
                parent._enter()
                self._savepoint = f"wink_{next(_names)}"
                work.run(f"SAVEPOINT {self._savepoint}")
                parent._inner = self
            self._has_begun = True
        work.restrict(self)

    def _clean_up(self, work: Work) -> None:
        """End what could not be ended while this thread was running a statement."""
        try:
            work.rollback()
            work.end(reuse=False)
        except Exception:
            _logger.exception("an abandoned transaction could not be rolled back")

    # As a participant

    def fork(self) -> Self:
        view = copy.copy(self)
        view._parent = self
        work = self._work
        if work is None:
            work = self._new_work()
            work.outer = view
            around: Any = transaction_under_way.get()
            if around is not None and not around.settled:
                outermost = around.lineage[0]
                work.call_id, work.tool = outermost.call.id, outermost.call.name
                work.session_id = outermost.base.session_id
        view._work = work
        view._lock = work.lock
        view._has_begun, view._savepoint, view._inner = False, "", None
        view._sealed = view.read_only = None
        return view

    def seal(self, reason: str) -> None:
        # Without the lock: a statement may take long. The next one is refused.
        if self._sealed is None:
            self._sealed = reason

    @property
    def lost_race(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._work is not None and self._work.lost_race

    def merge(self, view: Any) -> None:
        work: Work = view._work
        with work.lock:
            if self._work is not None:
                if view._has_begun:
                    view._finish()
                    work.run(f"RELEASE SAVEPOINT {view._savepoint}")
                    self._inner, view._has_begun = None, False
                return
            if view._has_begun and not work.is_over:
                view._finish()
                if view.read_only is not None:
                    work.rollback()
                else:
                    if work.is_recorded and self._log is not None:
                        self._log.finish(work, self._tell_workspace)
                    work.commit()
                self._commits[0] += 1
            view._has_begun = False
            work.end()

    def _tell_workspace(self) -> str:
        """Have the workspace of the call know this database, and return its identity if any."""
        around: Any = transaction_under_way.get()
        if around is None or self.address is None:
            return self.workspace
        for _, each in around.lineage[0].participants:
            if isinstance(each, (HostFilesystem, Branch)):
                noted = self._row_log.noted
                if each.store not in noted:
                    noted[each.store] = remember(each.store, self.address)
                return noted[each.store]
        return self.workspace

    def commit_with(self, redo: Callable[[], Any]) -> None:
        if self._work is not None:
            self._work.keep = redo

    def _finish(self) -> None:
        """Write what is pending, before the end of the transaction or savepoint."""

    def _drop(self) -> None:
        """Forget what is pending."""

    def discard(self, view: Any) -> Sequence[str]:
        work: Work = view._work
        if not work.hold():
            work.is_abandoned = True
            return ()
        try:
            view._drop()
            if self._work is not None:
                if view._has_begun and not work.is_over:
                    self._inner, view._has_begun = None, False
                    work.run(f"ROLLBACK TO SAVEPOINT {view._savepoint}")
                    work.run(f"RELEASE SAVEPOINT {view._savepoint}")
                return ()
            if work.was_committed:
                return (_COMMITTED.format(self.title),)
            if view._has_begun and not work.is_over:
                view._has_begun = False
                work.rollback()
            work.end()
        except Exception:
            # The connection is lost or broken: without it, the database rolls back by itself.
            _logger.warning("a rollback failed: its connection is closed", exc_info=True)
            work.end(reuse=False)
        finally:
            if work.was_committed:
                work.end(reuse=False)
            work.lock.release()
        return ()

    # Snapshots by hand

    def snapshot_here(self) -> Any:
        work = self._work
        if work is None:
            return self._commits[0]
        with work.lock:
            if not self._has_begun:
                return ""
            name = f"wink_{next(_names)}"
            work.run(f"SAVEPOINT {name}")
            return name

    def restore_here(self, token: Any, /) -> None:
        work = self._work
        if work is None:
            if self._commits[0] != token:
                raise ResourceError(
                    "calls have committed rows since, which cannot be taken back: put the block "
                    "into `with database.transaction()`"
                )
            return
        with work.lock:
            if not self._has_begun or work.is_over:
                return
            self._drop()
            if token or self._savepoint:
                work.run(f"ROLLBACK TO SAVEPOINT {token or self._savepoint}")
            else:
                work.rollback()
                self._has_begun = False


def seconds_left() -> float:
    """Return the seconds until the deadline of the call under way."""
    transaction: Any = transaction_under_way.get()
    deadline = None if transaction is None else transaction.context.deadline
    return math.inf if deadline is None else deadline.remaining()
