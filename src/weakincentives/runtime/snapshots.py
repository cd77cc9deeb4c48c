"""Transactions by hand: snapshots of the session and resources, and blocks that roll back."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from weakincentives.errors import ResourceError, SnapshotExpired
from weakincentives.logs import get_logger
from weakincentives.participant import Participant, participant_for
from weakincentives.resources import Snapshotable, as_resolver
from weakincentives.runtime.transactions import restore_all
from weakincentives.session import Session, Snapshot

_logger = get_logger(__name__)


class CompositeSnapshot:
    """A session's snapshot together with those of its resources."""

    __slots__ = ("__weakref__", "_tokens", "session", "tag")

    def __init__(self, session: Snapshot, tag: str) -> None:
        self.session = session
        self.tag = tag
        self._tokens: list[tuple[str, Participant, Any]] = []

    def built(self, name: str, instance: Snapshotable, /) -> None:
        """Snapshot a resource: one that is there, or one that was just built."""
        participant = participant_for(instance)
        known = any(each.exposed is instance for _, each, _ in self._tokens)
        if participant is not None and not known:
            self._tokens.append((name, participant, participant.snapshot_here()))

    def restore_resources(self) -> None:
        """Restore every resource; raise ResourceError at the end if any failed."""
        failures = restore_all(self._tokens)
        if failures:
            raise ResourceError("; ".join(failures.values()))


def _participants(resources: object) -> Any:
    resolver: Any = as_resolver(resources)
    return getattr(resolver, "context", resolver) if not hasattr(resolver, "watch") else resolver


def create_snapshot(
    session: Session, resources: object = None, *, tag: str = ""
) -> CompositeSnapshot:
    """Return the state of the session and of every resource that can be snapshotted.

    ``resources`` is ``prompt.resources``, an open resource context, a registry or a mapping.
    """
    snapshot = CompositeSnapshot(session.snapshot(tag=tag), tag)
    participants = _participants(resources)
    if hasattr(participants, "watch"):
        for name, resource in participants.watch(snapshot):
            snapshot.built(name, resource)
    return snapshot


def restore_snapshot(session: Session, resources: object, snapshot: CompositeSnapshot) -> None:
    """Restore a snapshot: STATE slices and resources; LOG slices stay.

    Resources that were first built since return to their initial state. Snapshots that were taken
    after this one expire.
    """
    session.restore(snapshot.session)
    snapshot.restore_resources()


@contextmanager
def tool_transaction(
    session: Session, resources: object = None, *, tag: str = ""
) -> Generator[CompositeSnapshot]:
    """Roll the session and resources back when the block raises. Blocks nest as savepoints."""
    snapshot = create_snapshot(session, resources, tag=tag)
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

    @property
    def pending(self) -> tuple[str, ...]:
        """The ids of tool uses under way."""
        return tuple(self._pending)

    def begin_tool_execution(self, *, tool_use_id: str, tool_name: str) -> None:
        """Snapshot the state before a tool runs."""
        if tool_use_id in self._pending:
            raise ValueError(f"tool use {tool_use_id!r} has begun already")
        snapshot = create_snapshot(self._session, self._resources, tag=f"tool:{tool_name}")
        self._pending[tool_use_id] = (tool_name, snapshot)

    def end_tool_execution(self, *, tool_use_id: str, success: bool) -> bool:
        """Commit what the tool did, or roll it back; returns whether it was rolled back.

        An unknown id is no error: hooks may come twice, or for tools that are not tracked.
        """
        pending = self._pending.pop(tool_use_id, None)
        if pending is None:
            return False
        tool_name, snapshot = pending
        if success:
            # The rollback of a tool that began earlier has undone this one, too.
            return not self._session.can_restore(snapshot.session)
        try:
            restore_snapshot(self._session, self._resources, snapshot)
        except SnapshotExpired:
            # The rollback of a tool that began earlier has undone this one, too.
            _logger.info("tool %s was rolled back with an earlier one", tool_name)
        return True

    def abort_all(self) -> tuple[str, ...]:
        """Roll back every pending tool, the newest first; returns their ids."""
        aborted = tuple(reversed(self._pending))
        for tool_use_id in aborted:
            self.end_tool_execution(tool_use_id=tool_use_id, success=False)
        return aborted
