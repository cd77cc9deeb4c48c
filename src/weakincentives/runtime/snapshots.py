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
        """Note a resource's state: as it is now, or right after it was first built."""
        participant = participant_for(instance)
        known = any(each.exposed is instance for _, each, _ in self._tokens)
        if participant is not None and not known:
            self._tokens.append((name, participant, participant.snapshot_here()))

    def restore_resources(self) -> None:
        """Restore every resource; one that could not be is an error, once all were tried."""
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
    """Go back to a snapshot: STATE slices and resources; LOG slices stay.

    Resources that were first built since go back to how they began. Snapshots that were taken
    after this one cannot be restored any more.
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
            # The block went back to an older snapshot itself: there is nothing left to undo.
            _logger.info("transaction %r was rolled back further than it began", tag)
        raise


class PendingToolTracker:
    """Rolls back tools that run elsewhere and are only seen to begin and to end.

    For hooks: a vendor's program tells when its own tool starts and how it ended.
    """

    def __init__(self, *, session: Session, resources: object = None) -> None:
        self._session = session
        self._resources = resources
        self._pending: dict[str, tuple[str, CompositeSnapshot]] = {}

    @property
    def pending(self) -> tuple[str, ...]:
        """The ids of tool uses that have begun and not ended."""
        return tuple(self._pending)

    def begin_tool_execution(self, *, tool_use_id: str, tool_name: str) -> None:
        """Note the state before a tool runs."""
        if tool_use_id in self._pending:
            raise ValueError(f"tool use {tool_use_id!r} has begun already")
        snapshot = create_snapshot(self._session, self._resources, tag=f"tool:{tool_name}")
        self._pending[tool_use_id] = (tool_name, snapshot)

    def end_tool_execution(self, *, tool_use_id: str, success: bool) -> bool:
        """Keep what the tool did, or roll it back; returns whether it was rolled back.

        An id that never began is no error: hooks may come twice, or for tools not tracked.
        """
        pending = self._pending.pop(tool_use_id, None)
        if pending is None:
            return False
        tool_name, snapshot = pending
        if success:
            # A tool that began earlier and failed has taken this one's changes with it.
            return not self._session.can_restore(snapshot.session)
        try:
            restore_snapshot(self._session, self._resources, snapshot)
        except SnapshotExpired:
            # A tool that began earlier was rolled back meanwhile, and this one's changes with it.
            _logger.info("tool %s was rolled back with an earlier one", tool_name)
        return True

    def abort_all(self) -> tuple[str, ...]:
        """Roll back every pending tool, the newest first; returns their ids."""
        aborted = tuple(reversed(self._pending))
        for tool_use_id in aborted:
            self.end_tool_execution(tool_use_id=tool_use_id, success=False)
        return aborted
