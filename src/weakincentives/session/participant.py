"""The contract of everything that takes part in a transaction.

A call works on views. ``fork`` makes one, ``check_conflicts`` validates what it read, ``merge``
commits it and ``discard`` undoes it. ``seal`` fences it off once the call has ended. The session,
both filesystems, the memory and the event bus implement the contract; a resource that only has
``snapshot`` and ``restore``, and perhaps ``fork`` and ``merge``, is adapted to it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from inspect import iscoroutinefunction, signature
from typing import Any, Protocol, Self, TypeGuard, cast

from weakincentives.core.gate import Gate, Lease, ObjectGate, gate_of
from weakincentives.core.logs import get_logger
from weakincentives.errors import ReadOnlyView, ViewClosed

__all__ = [
    "Adapted",
    "Forkable",
    "Participant",
    "Snapshotable",
    "can_fork",
    "misfit",
    "not_restored",
    "participant_for",
    "restore_all",
]

_logger = get_logger(__name__)


class Snapshotable(Protocol):
    """A resource that takes part in transactions: calls change it in place, one at a time."""

    @abstractmethod
    def snapshot(self) -> object:
        """Return a token for the present state."""
        ...

    @abstractmethod
    def restore(self, token: Any, /) -> None:
        """Restore the state of a token."""
        ...


class Forkable(Snapshotable, Protocol):
    """A resource that gives each call a view of its own, so that calls of a turn run concurrently.

    For each fork either ``merge`` or ``discard`` is called, exactly once. A class that inherits
    from this one needs no ``discard`` of its own. ``check_conflicts(view)`` and ``seal(reason)``
    are optional beside these.
    """

    @abstractmethod
    def fork(self) -> Self:
        """Return a private view: it starts as this is now, and neither sees the other's changes."""
        ...

    @abstractmethod
    def merge(self, view: Self, /) -> None:
        """Commit a view's changes, all of them or none.

        Raises:
            MergeConflict: Something the view depends on has changed here since the fork.
        """
        ...

    def discard(self, view: Self, /) -> Sequence[str] | None:
        """Undo what a view did outside itself; may return sentences for what could not be."""
        return None


class Participant:
    """Takes part in transactions."""

    in_place: bool = False
    """Whether calls change the object itself, so that only one call at a time can use it."""
    journalled: bool = False
    """Whether merging and undoing take several steps that Ctrl-C must not interrupt."""
    commits_last: bool = False
    """Whether a merge is final: nothing that can fail may come after it."""
    in_call_order: bool = False
    """Whether the concurrent calls of a turn can use it only one after the other."""
    lost_race: bool = False
    """Whether another transaction kept this view from going on, so that its call can be re-run."""
    patience: float = 30.0
    """Seconds for which such a call is re-run."""
    read_only: str | None = None
    """Why changes to this view are refused; None when they are not."""
    _sealed: str | None = None
    _lock: Any
    """Re-entrant. Held while something is changed, so that nothing changes after ``seal``."""

    @property
    def gate(self) -> Gate | None:
        """The gate that a call holds from start to end, if only one call at a time can run."""
        return None

    object_gate: ObjectGate | None = None
    """If calls change the object itself: the gate that a call is in while it takes part with it."""

    @property
    def exposed(self) -> Any:
        """What a handler works with."""
        return self

    def snapshot_here(self) -> Any:
        """Return a token for the state of this very object, whichever call is under way."""
        raise NotImplementedError

    def restore_here(self, token: Any, /) -> None:
        """Go back to a token's state, also when this object is sealed or read-only."""
        raise NotImplementedError

    def fork(self) -> Any:
        """Return a private view: it starts as this is now, and neither sees the other's changes."""
        raise NotImplementedError

    def fork_in_place(self) -> Any:
        """Return a view for the only call under way, which may change the original at once."""
        return self.fork()

    def fork_to_read(self, lease: Lease) -> Any:
        """Return a view for a call that only reads, beside the one inside the gate."""
        return self.fork()

    def check_conflicts(self, view: Any) -> None:
        """Raise MergeConflict if something the view depends on has changed here since the fork."""

    def merge(self, view: Any) -> None:
        """Commit a view's changes, all of them or none. A sealed view can be merged.

        Raises:
            MergeConflict: Something the view read or changed has changed here since the fork.
        """
        raise NotImplementedError

    def discard(self, view: Any) -> Sequence[str]:
        """Undo what a view changed; returns a sentence for each thing that could not be undone."""
        return ()

    def seal(self, reason: str) -> None:
        """Fence this view: refuse and log every later change with ``ViewClosed``; reads go on."""
        with self._lock:
            if self._sealed is None:
                self._sealed = reason

    def check_open(self, operation: str) -> None:
        """Raise ViewClosed, and log it, if this view is sealed."""
        if self._sealed is not None:
            _logger.error("Refused %s: %s", operation, self._sealed)
            raise ViewClosed(self._sealed)

    @property
    def is_writable(self) -> bool:
        return self._sealed is None and self.read_only is None

    def check_writable(self, operation: str) -> None:
        """Raise ViewClosed or ReadOnlyView if this view must not be changed."""
        if self._sealed is not None:
            self.check_open(operation)
        if self.read_only is not None:
            raise ReadOnlyView(self.read_only)

    def changed_here(self) -> tuple[str, ...]:
        """Return the paths of files that this view has changed."""
        return ()

    @property
    def holds_redo(self) -> bool:
        """Whether merging a view that changed files writes a record that can hold more."""
        return False

    def commit_with(self, redo: Callable[[], Any]) -> None:
        """Have the record that commits this view hold what ``redo`` returns, for its session."""

    @property
    def is_changing_files(self) -> bool:
        """Whether this thread is in the middle of a change of files on disk by this view."""
        return False

    def covers(self, path: str) -> bool:
        """Whether discarding this view also undoes plain changes of a file on disk.

        From a call's first change of a path on, everything that happens there belongs to the call.
        """
        return False

    def expect_external(self) -> None:
        """Expect programs that the call starts to change things without this object."""

    announces: bool = False
    """Whether ``after_commit`` has anything to do."""

    def after_commit(self) -> None:
        """Called when what was merged is final."""


class Adapted(Participant):
    """A resource that has only ``snapshot`` and ``restore``, or also ``fork`` and ``merge``.

    Without ``fork``, its view is a token: a call changes the resource itself, and ``discard``
    restores it.
    """

    _token: object = None

    def __init__(
        self, resource: Snapshotable, *, in_place: bool, gate: ObjectGate | None = None
    ) -> None:
        self._resource = resource
        self.in_place = in_place
        if in_place:
            self.object_gate = gate or gate_of(resource)

    @property
    def exposed(self) -> Any:
        return self._resource

    @property
    def _forkable(self) -> Forkable:
        """The resource, unless it is changed in place."""
        return cast("Forkable", self._resource)

    def snapshot_here(self) -> Any:
        return self._resource.snapshot()

    def restore_here(self, token: Any, /) -> None:
        self._resource.restore(token)

    def fork(self) -> Self:
        if not self.in_place:
            return type(self)(self._forkable.fork(), in_place=False)
        view = type(self)(self._resource, in_place=True, gate=self.object_gate)
        view._token = self._resource.snapshot()
        return view

    def check_conflicts(self, view: Any) -> None:
        self._call("check_conflicts", view.exposed)

    def merge(self, view: Any) -> None:
        if not self.in_place:
            self._forkable.merge(view.exposed)

    def discard(self, view: Any) -> Sequence[str]:
        if self.in_place:
            self._resource.restore(view._token)
            return ()
        return self._call("discard", view.exposed) or ()

    def seal(self, reason: str) -> None:
        self._call("seal", reason)

    def _call(self, name: str, *args: object) -> Any:
        """Call an optional method of a resource that can fork."""
        method = None if self.in_place else getattr(self._resource, name, None)
        return None if method is None else method(*args)


def misfit(resource: Any) -> str | None:
    """Return what is missing for a resource to be rolled back, if it looks as if it should be."""
    if isinstance(resource, (Participant, type)):
        return None
    cls = cast("type[Any]", type(resource))
    names = ("snapshot", "restore", "fork", "merge")
    found = {n: method for n in names if callable(method := getattr(cls, n, None))}
    if ("snapshot" in found) != ("restore" in found):
        has, lacks = ("snapshot", "restore") if "snapshot" in found else ("restore", "snapshot")
        return f"it has {has}() but no {lacks}(): add it, or rename {has}()"
    if "fork" in found and "merge" in found and "snapshot" not in found:
        return "it has fork() and merge() but no snapshot() and restore(): add both"
    if "fork" in found and "snapshot" in found and "merge" not in found:
        return "it has fork() but no merge(): add it, or rename fork()"
    if "snapshot" not in found:
        return None
    for name, method in found.items():
        if iscoroutinefunction(method):
            return f"{name}() must not be async"
        given = (resource,) if name in ("snapshot", "fork") else (resource, object())
        try:
            signature(method).bind(*given)
        except TypeError as error:
            takes = "nothing" if len(given) == 1 else "one value"
            return f"{name}() is called with {takes}: {error}"
        except ValueError:  # a built-in without a signature
            pass
    return None


def participant_for(resource: Any) -> Participant | None:
    """Return the participant for a resource; None if it takes no part in transactions."""
    if isinstance(resource, Participant):
        return resource
    methods = (getattr(resource, name, None) for name in ("snapshot", "restore"))
    if isinstance(resource, type) or not all(map(callable, methods)):  # a class has none to call
        return None
    return Adapted(resource, in_place=not can_fork(resource))


def can_fork(resource: object) -> bool:
    """Whether calls get views of a resource; all others are changed in place."""
    return isinstance(resource, Participant) or _is_forkable(resource)


def _is_forkable(resource: object) -> TypeGuard[Forkable]:
    """Whether it is one of a user's; ``discard`` may be missing, and is not called then."""
    return hasattr(resource, "fork") and hasattr(resource, "merge")


def restore_all(tokens: Sequence[tuple[str, Participant, Any]]) -> dict[str, str]:
    """Restore newest first, whatever fails; returns by name what could not be restored."""
    failures: dict[str, str] = {}
    for name, participant, token in reversed(tokens):
        try:
            participant.restore_here(token)
        except Exception as error:
            failures[name] = not_restored(name, error)
    return failures


def not_restored(name: str, error: Exception) -> str:
    """Log that something could not be restored, and return it as a sentence."""
    _logger.error("restoring %s failed", name, exc_info=error)
    return f"{name} could not be restored: {error}"
