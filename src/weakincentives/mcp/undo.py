"""Tools that show what was done and take it back: files, session state and resources alike.

What there is to undo is read from the session's record of calls, which outlives the process where
the session is saved. How the session was before a call is known for as long as the process lives.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import islice
from typing import Any

from weakincentives.call import ToolCall
from weakincentives.errors import SnapshotError, ToolValidationError, UndoRefused
from weakincentives.filesystem import Committed, Filesystem, HostFilesystem
from weakincentives.participant import Participant
from weakincentives.prompt.policies import CompletedTools, PolicyState
from weakincentives.prompt.prompt import Offer
from weakincentives.prompt.tool import Reach, Tool, ToolContext
from weakincentives.prompt.tool_result import ToolResult
from weakincentives.runtime.events import ToolInvoked
from weakincentives.runtime.saved import not_undone
from weakincentives.runtime.session import Session, Snapshot
from weakincentives.slices import SlicePolicy, slice_policy

_MOST_POINTS = 200
"""Calls whose session state can be undone; what files were is kept on disk, by size."""


@dataclass(frozen=True, slots=True)
class UndoParams:
    call_id: str | None = None
    """Undo this call, as `history` names it. By default the last one that changed something and was
    not undone yet."""
    and_later: bool = False
    """Undo all that came after that call, too."""
    checkpoint: str | None = None
    """Go back to this checkpoint instead: all that came after it is undone."""


@dataclass(frozen=True, slots=True)
class Undone:
    """What was taken back."""

    calls: tuple[str, ...]
    """The ids of the calls, the newest first."""
    tools: tuple[str, ...]
    """The tools that they called."""
    notes: tuple[str, ...] = ()
    """What is not as it was, a sentence each."""

    def render(self) -> str:
        made = ", ".join(self.tools)
        many = "1 call" if len(self.calls) == 1 else f"{len(self.calls)} calls"
        return "\n".join([f"Undone: {many} ({made}).", *self.notes])


@dataclass(frozen=True, slots=True)
class CheckpointParams:
    name: str
    """What to call the state of now. A name that is taken stands for now from here on."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A name for the state at one moment."""

    name: str

    def render(self) -> str:
        return f'To come back here, call `undo` with checkpoint "{self.name}".'


@slice_policy(SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class CheckpointState:
    """The session's state at a checkpoint, for another process to go back to."""

    call_id: str
    state: str


@dataclass(frozen=True, slots=True)
class HistoryParams:
    limit: int = 20
    """How many calls to show, the newest ones."""
    call_id: str | None = None
    """Show what this call changed in files, as a diff."""


@dataclass(frozen=True, slots=True)
class CallSummary:
    """One call, as the history shows it."""

    call_id: str
    tool: str
    success: bool
    time: str
    paths: tuple[str, ...] = ()
    """The files that it changed."""
    undone: bool = False
    checkpoint: str = ""

    def render(self) -> str:
        how = "undone" if self.undone else "ok" if self.success else "failed"
        about = f' "{self.checkpoint}"' if self.checkpoint else ""
        changed = f": {', '.join(self.paths)}" if self.paths else ""
        return f"{self.time} {self.call_id} {self.tool}{about} {how}{changed}"


@dataclass(frozen=True, slots=True)
class History:
    """The last calls, the oldest first."""

    calls: tuple[CallSummary, ...]
    diff: str = ""

    def render(self) -> str:
        lines = [call.render() for call in self.calls] or ["Nothing was called yet."]
        return self.diff or "\n".join(lines)


@dataclass(slots=True)
class _Point:
    """How things were before a call, but for files on disk: those have a history of their own."""

    session: Snapshot
    resources: dict[str, object]
    changed: bool = True
    """Whether the call has changed any of it, as far as one can tell."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What is to be undone, the newest first, and what the way back leads to."""

    undone: list[ToolInvoked]
    to: ToolInvoked
    """The oldest of them, or a checkpoint."""
    later: Sequence[ToolInvoked] = ()
    """What came after them, and stays."""


class UndoTools:
    """The tools ``undo``, ``history`` and ``checkpoint`` for the calls of one session."""

    guide = (
        "Every call is a transaction: one that fails has changed nothing. `undo` takes back the "
        "last call that changed something, `checkpoint` names a state to come back to, and "
        "`history` shows what was done."
    )

    def __init__(self, session: Session) -> None:
        self._session = session
        self._points: OrderedDict[str, _Point] = OrderedDict()

    @cached_property
    def tools(self) -> tuple[Tool[Any, Any], ...]:
        return (
            Tool[UndoParams, Undone](
                name="undo",
                description="Take back the last change, or all since a call or a checkpoint: "
                "files and session state. What somebody else changed is never lost.",
                handler=self._undo,
                reach="reversible",
            ),
            Tool[HistoryParams, History](
                name="history",
                description="Show the last calls and the files they changed, or one call's diff.",
                handler=self._history,
                reach="read",
            ),
            Tool[CheckpointParams, Checkpoint](
                name="checkpoint",
                description="Name the present state of files and session, to come back to it "
                "with `undo`.",
                handler=self._checkpoint,
                reach="reversible",
            ),
        )

    # What is noted of each call

    def before(self, call: ToolCall, offer: Offer | None, context: ToolContext) -> None:
        """Note how things are, where the call may change them."""
        if offer is not None and offer.tool.reach != "read" and offer.tool not in self.tools:
            self._points[call.id] = _point(self._session, context)
            if len(self._points) > _MOST_POINTS:
                self._points.popitem(last=False)

    def after(self, call: ToolCall, result: ToolResult[Any]) -> None:
        """Note whether the call has changed something; forget it where it has failed."""
        point = self._points.get(call.id)
        if point is None:
            return
        if result.success:
            point.changed = bool(point.resources) or self._differs(point)
        else:
            del self._points[call.id]

    def _differs(self, point: _Point) -> bool:
        before, now = point.session.state, self._session.snapshot_here().state
        if before is now:
            return False
        # What policies remember of calls is no change that anybody would want to undo by itself.
        return bool(before.keys() - now.keys()) or any(
            before.get(kind) is not values
            for kind, values in now.items()
            if kind not in (PolicyState, CompletedTools)
        )

    # The tools

    def _undo(self, params: UndoParams, *, context: ToolContext) -> ToolResult[Undone]:
        if params.checkpoint is not None and params.call_id is not None:
            return ToolResult.error("Name a call or a checkpoint, not both")
        on_disk = _changed_on_disk(context)
        reaches = _reaches(context)
        chosen = self._chosen(params, on_disk, reaches, context)
        if not chosen.undone:
            return ToolResult.error("Nothing has changed since: there is nothing to undo")
        ids = tuple(record.call_id for record in chosen.undone)
        notes = _undo_files([each for each in ids if each in on_disk], context)
        notes += self._restore_state(chosen, context)
        notes += [
            f"What {record.tool_name} did outside of files and session stays."
            for record in chosen.undone
            if reaches.get(record.tool_name) in ("compensable", "irreversible")
        ]
        tools = tuple(record.tool_name for record in chosen.undone)
        return ToolResult.ok(Undone(ids, tools, tuple(dict.fromkeys(notes))))

    def _chosen(
        self,
        params: UndoParams,
        on_disk: Mapping[str, object],
        reaches: Mapping[str, Reach | None],
        context: ToolContext,
    ) -> _Chosen:
        """Return what is to be undone, or say why nothing can be."""
        later: list[ToolInvoked] = []
        checkpoints: dict[str, None] = {}
        for record in _standing(context):
            value = record.result.value
            if isinstance(value, Checkpoint):
                if value.name == params.checkpoint:
                    return _Chosen(later, record)
                checkpoints[value.name] = None
            elif self._may_have_changed(record, on_disk, reaches):
                # Of what was before a restart, only files are known for sure.
                is_known = record.call_id in on_disk or record.call_id in self._points
                is_it = is_known if params.call_id is None else record.call_id == params.call_id
                if is_it and params.checkpoint is None:
                    if params.and_later:
                        return _Chosen([*later, record], record)
                    return _Chosen([record], record, later)
                later.append(record)
        if params.checkpoint is not None:
            known = ", ".join(checkpoints) or "none"
            raise ToolValidationError(
                f"There is no checkpoint {params.checkpoint!r}. Checkpoints: {known}"
            )
        if params.call_id is None:
            raise ToolValidationError("There is no change that could be undone")
        raise ToolValidationError(
            f"The call {params.call_id!r} changed nothing that could be undone; look at the history"
        )

    def _may_have_changed(
        self,
        record: ToolInvoked,
        on_disk: Mapping[str, object],
        reaches: Mapping[str, Reach | None],
    ) -> bool:
        if record.call_id in on_disk:
            return True
        point = self._points.get(record.call_id)
        if point is not None:
            return point.changed
        return reaches.get(record.tool_name, "read") != "read"

    def _restore_state(self, chosen: _Chosen, context: ToolContext) -> list[str]:
        """Go back to the state before what is undone; return what there is to say about it."""
        point = self._points.get(chosen.to.call_id)
        if any(self._changed_state(record) for record in chosen.later):
            if point is not None and not point.changed:
                return []  # it only changed files, and what came later is not to be lost
            raise ToolValidationError(
                "Later calls have changed the session's state, too: undo those first, or pass "
                "and_later=true"
            )
        if point is not None:
            snapshot = point.session
        elif isinstance(chosen.to.result.value, Checkpoint):
            snapshot = _saved_state(chosen.to.call_id, context.session)
        else:
            snapshot = None
        if snapshot is None or not context.session.can_restore(snapshot):
            return ["The session's state (plans and the like) stays: how it was is not known now."]
        context.session.restore(snapshot)
        if point is not None:
            _restore_resources(point, context)
        return []

    def _changed_state(self, record: ToolInvoked) -> bool:
        point = self._points.get(record.call_id)
        return point is not None and point.changed

    def _checkpoint(
        self, params: CheckpointParams, *, context: ToolContext
    ) -> ToolResult[Checkpoint]:
        point = self._points[context.call_id] = _point(context.session, context)
        try:
            state = point.session.to_json(include_log=False)
            context.session.dispatch(CheckpointState(context.call_id, state))
        except SnapshotError:
            pass  # it has something that cannot be written: known as long as the process lives
        return ToolResult.ok(Checkpoint(params.name), f"Checkpoint: {params.name}")

    def _history(self, params: HistoryParams, *, context: ToolContext) -> ToolResult[History]:
        if params.call_id is not None:
            files = _host_files(context)
            try:
                diff = "" if files is None else files.diff(params.call_id)
            except LookupError:
                diff = ""
            if not diff:
                return ToolResult.error(
                    f"The call {params.call_id!r} changed no file that is known"
                )
            return ToolResult.ok(History((), diff))
        on_disk = _changed_on_disk(context)
        calls: list[CallSummary] = []
        undone = _undone_on_disk(context)
        for record in islice(context.session[ToolInvoked].newest_first(), max(params.limit, 1)):
            calls.append(_summary(record, on_disk, undone))
            if isinstance(record.result.value, Undone):
                undone.update(record.result.value.calls)
        return ToolResult.ok(History(tuple(reversed(calls))))


# Reading the record of calls


def _reaches(context: ToolContext) -> dict[str, Reach | None]:
    rendered = context.rendering
    if rendered is None:
        return {}
    return {name: offer.tool.reach for name, offer in rendered.offers.items()}


def _standing(context: ToolContext) -> Iterator[ToolInvoked]:
    """Yield the calls that succeeded and were not undone, the newest first."""
    undone: set[str] = set()  # those that are still to come
    undone_on_disk = _undone_on_disk(context)
    for record in context.session[ToolInvoked].newest_first():
        value = record.result.value
        if record.call_id in undone:
            undone.remove(record.call_id)
        elif not (record.success and record.ran) or record.call_id in undone_on_disk:
            continue
        elif isinstance(value, Undone):
            undone.update(value.calls)
        elif not (isinstance(value, Checkpoint) and undone):
            # A checkpoint is none any more when something from before it was undone.
            yield record


def _summary(
    record: ToolInvoked, on_disk: dict[str, tuple[str, ...]], undone: Container[str]
) -> CallSummary:
    value = record.result.value
    return CallSummary(
        call_id=record.call_id,
        tool=record.tool_name,
        success=record.success,
        time=datetime.fromtimestamp(record.timestamp, UTC).strftime("%Y-%m-%d %H:%M:%SZ"),
        paths=tuple(path for path in on_disk.get(record.call_id, ()) if path != "."),
        undone=record.call_id in undone,
        checkpoint=value.name if isinstance(value, Checkpoint) else "",
    )


def _saved_state(call_id: str, session: Session) -> Snapshot | None:
    for saved in session[CheckpointState].newest_first():
        if saved.call_id == call_id:
            return Snapshot.from_json(saved.state)
    return None


# Files and other resources


def _host_files(context: ToolContext) -> HostFilesystem | None:
    files = context.resources.find(Filesystem)
    return files if isinstance(files, HostFilesystem) else None


def _history_of(context: ToolContext) -> Sequence[Committed]:
    files = _host_files(context)
    return () if files is None else files.history()


def _changed_on_disk(context: ToolContext) -> dict[str, tuple[str, ...]]:
    """Return the paths that calls have changed on disk, by call, the oldest first."""
    return {each.call_id: each.paths for each in _history_of(context)}


def _undone_on_disk(context: ToolContext) -> set[str]:
    """Return the calls whose changes to files are undone now: `wink undo` can do that, too."""
    history = _history_of(context)
    return {each.call_id for each in history} - not_undone(history)


def _undo_files(calls: list[str], context: ToolContext) -> list[str]:
    """Undo what calls did to files, all of it; return a sentence for each thing that is left."""
    files = _host_files(context)
    if files is None or not calls:
        return []
    try:
        return list(files.undo(*calls))
    except UndoRefused as error:
        standing = {record.call_id for record in _standing(context)}
        ours = {record.call_id for record in context.session[ToolInvoked]}
        told: list[str] = []
        for path, others in sorted(error.paths.items()):
            # What was undone, and undoing it, leaves a file as it was.
            named = [call for call in others if call in standing or call not in ours]
            told.append(f"{path} was changed since by {', '.join(named) or 'somebody else'}")
        raise ToolValidationError("\n".join(["Nothing is undone:", *told])) from error


def _point(session: Session, context: ToolContext) -> _Point:
    resources: Any = getattr(context.resources, "context", context.resources)
    named: Iterable[tuple[str, Any]] = getattr(resources, "snapshotables", ())
    tokens = {
        name: resource.snapshot_here() if isinstance(resource, Participant) else resource.snapshot()
        for name, resource in named
        # A snapshot would keep its history from being cut to size.
        if not isinstance(resource, HostFilesystem)
    }
    return _Point(session.snapshot(), tokens)


def _restore_resources(point: _Point, context: ToolContext) -> None:
    resources: Any = context.resources
    for name, resource in resources.snapshotables:
        if name in point.resources:
            resource.restore(point.resources[name])
