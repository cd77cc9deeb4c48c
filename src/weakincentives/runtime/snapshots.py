"""Transactions by hand: snapshots of a session and its resources, blocks, and hooks."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from weakincentives.core.call import transaction_under_way
from weakincentives.core.gate import Holder, running_loop
from weakincentives.core.logs import get_logger
from weakincentives.errors import ResourceError, SnapshotExpired
from weakincentives.resources import Snapshotable, as_resolver, in_gate_order
from weakincentives.runtime.transactions import block_under_way, gate_of_one
from weakincentives.session.participant import Participant, participant_for, restore_all

if TYPE_CHECKING:
    from weakincentives.runtime.transactions import Transaction
    from weakincentives.session.session import Session, Snapshot

_logger = get_logger(__name__)


class CompositeSnapshot:
    """A session's snapshot together with those of its resources."""

    __slots__ = ("__weakref__", "_holder", "_tokens", "session", "tag")

    def __init__(self, session: Snapshot, tag: str, holder: Holder | None = None) -> None:
        self.session = session
        self.tag = tag
        self._holder = holder
        """What holds the gates of the resources, while a block is under way."""
        self._tokens: list[tuple[str, Participant, Any]] = []

    def built(self, name: str, instance: Snapshotable, /) -> None:
        """Snapshot a resource, existing or just built."""
        participant = participant_for(instance)
        known = any(each.exposed is instance for _, each, _ in self._tokens)
        if participant is None or known:
            return
        holder, gate = self._holder, participant.object_gate
        if holder is None or holder.is_closed or gate is None:
            pass
        # Not by waiting: the lock of the resource context is held.
        elif not holder.try_enter(gate):
            raise ResourceError(
                f"another call is using {name}: request it before the transaction begins"
            )
        self._tokens.append((name, participant, participant.snapshot_here()))

    def restore_resources(self) -> None:
        """Restore every resource; raise ResourceError at the end if any failed."""
        in_place = [(name, participant) for name, participant, _ in self._tokens]
        with _holding(in_gate_order(in_place), self._holder):
            failures = restore_all(self._tokens)
        if failures:
            raise ResourceError("; ".join(failures.values()))


def create_snapshot(
    session: Session, resources: object = None, *, tag: str = ""
) -> CompositeSnapshot:
    """Return the state of the session and of every resource that can be snapshotted.

    ``resources`` is ``prompt.resources``, an open resource context, a registry or a mapping.
    """
    resolver = _watchable(resources)
    with _holding(_in_place(resolver)):
        return _create_snapshot(session, resolver, tag)


def _create_snapshot(
    session: Session, resolver: Any, tag: str, holder: Holder | None = None
) -> CompositeSnapshot:
    snapshot = CompositeSnapshot(session.snapshot(tag=tag), tag, holder)
    if resolver is not None:
        for name, resource in resolver.watch(snapshot):
            snapshot.built(name, resource)
    return snapshot


def _watchable(resources: object) -> Any:
    resolver: Any = as_resolver(resources)
    return (
        resolver if hasattr(resolver, "watch") else getattr(resolver, "context", None)
    )  # a prompt


def _in_place(resolver: Any) -> tuple[tuple[str, Participant], ...]:
    """Return what is changed in place, of what a resolver has built."""
    if resolver is None:
        return ()
    found = ((name, participant_for(each)) for name, each in resolver.snapshotables)
    return in_gate_order((name, each) for name, each in found if each is not None)


def _new_holder(outer: Holder | None = None) -> Holder:
    """Return a holder for a block by hand, which belongs to the block or call it is in."""
    under_way: Transaction | None = transaction_under_way.get()
    if outer is None or outer.is_closed:
        outer = block_under_way.get() if under_way is None else under_way.around.holder
    holder = Holder(outer)
    holder.loop = running_loop()
    return holder


@contextmanager
def _holding(
    in_place: Sequence[tuple[str, Participant]], outer: Holder | None = None
) -> Generator[Holder]:
    """Have objects to ourselves for the block; calls made in it may use them, too."""
    holder = _new_holder(outer)
    before = block_under_way.set(holder)
    try:
        holder.enter([gate_of_one(each) for each in in_place])
        yield holder
    finally:
        holder.close()
        block_under_way.reset(before)


def restore_snapshot(session: Session, resources: object, snapshot: CompositeSnapshot) -> None:
    """Restore a snapshot: STATE slices and resources; LOG slices stay.

    Resources that were first built since return to their initial state. Snapshots that were taken
    after this one expire. What other sessions have changed since in a resource is undone, too: in
    a ``tool_transaction`` block they wait.
    """
    session.restore(snapshot.session)
    snapshot.restore_resources()


@contextmanager
def tool_transaction(
    session: Session, resources: object = None, *, tag: str = ""
) -> Generator[CompositeSnapshot]:
    """Roll the session and resources back when the block raises. Blocks nest as savepoints."""
    resolver = _watchable(resources)
    with _holding(_in_place(resolver)) as holder:
        snapshot = _create_snapshot(session, resolver, tag, holder)
        try:
            yield snapshot
        except BaseException:  # an interrupted block must not leave half its writes
            try:
                restore_snapshot(session, resources, snapshot)
            except SnapshotExpired:
                # The block restored an older snapshot itself: there is nothing left to undo.
                _logger.info("transaction %r was rolled back past its start", tag)
            raise


class PendingToolTracker:
    """Rolls back tools that another program runs, from hooks at their start and end."""

    def __init__(self, *, session: Session, resources: object = None) -> None:
        self._session = session
        self._resources = resources
        self._pending: dict[str, tuple[str, CompositeSnapshot]] = {}
        self._holder: Holder | None = None
        """What holds the gates of the resources while tool uses are under way."""

    @property
    def pending(self) -> tuple[str, ...]:
        """The ids of tool uses under way."""
        return tuple(self._pending)

    def begin_tool_execution(self, *, tool_use_id: str, tool_name: str) -> None:
        if tool_use_id in self._pending:
            raise ValueError(f"tool use {tool_use_id!r} has begun already")
        resolver, is_first = _watchable(self._resources), not self._pending
        if is_first:
            # For calls on the same session, too: they may be part of what the tool does.
            self._holder = self._session.holder = _new_holder()
        assert self._holder is not None
        try:
            self._holder.enter([gate_of_one(each) for each in _in_place(resolver)])
            snapshot = _create_snapshot(self._session, resolver, f"tool:{tool_name}", self._holder)
        except BaseException:
            if is_first:
                self._leave()
            raise
        self._pending[tool_use_id] = (tool_name, snapshot)

    def end_tool_execution(self, *, tool_use_id: str, success: bool) -> bool:
        """Commit what the tool did, or roll it back; returns whether it was rolled back.

        An unknown id is no error: hooks may come twice, or for tools that are not tracked.
        """
        pending = self._pending.pop(tool_use_id, None)
        if pending is None:
            return False
        tool_name, snapshot = pending
        try:
            if success:
                # The rollback of a tool that began earlier has undone this one, too.
                return not self._session.can_restore(snapshot.session)
            try:
                restore_snapshot(self._session, self._resources, snapshot)
            except SnapshotExpired:
                # The rollback of a tool that began earlier has undone this one, too.
                _logger.info("tool %s was rolled back with an earlier one", tool_name)
            return True
        finally:
            if not self._pending:
                self._leave()

    def abort_all(self) -> tuple[str, ...]:
        """Roll back every pending tool, the newest first; returns their ids."""
        aborted = tuple(reversed(self._pending))
        for tool_use_id in aborted:
            self.end_tool_execution(tool_use_id=tool_use_id, success=False)
        return aborted

    def _leave(self) -> None:
        holder = self._holder
        if holder is not None:
            holder.close()
            if self._session.holder is holder:
                self._session.holder = None

    def __del__(self) -> None:
        if "_holder" in self.__dict__:
            self._leave()  # the end of a tool use may never be reported
