"""Tools that list and undo calls: files, session state and resources alike.

The calls are read from the session, which outlives the process if it is saved. The state before a
call is known only as long as the process lives.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from weakincentives.contrib.databases import Database
from weakincentives.core.call import ToolCall
from weakincentives.errors import RowUndoRefused, SnapshotError, ToolValidationError, UndoRefused
from weakincentives.filesystem import Filesystem, HostFilesystem
from weakincentives.filesystem.ignored import IgnoredFiles
from weakincentives.mcp.server_resources import McpResource
from weakincentives.prompt.policies import CompletedTools, KnownFiles, PolicyState
from weakincentives.prompt.prompt import OfferedTool
from weakincentives.prompt.tool import Reach, Tool, ToolContext
from weakincentives.runtime.saved import not_undone
from weakincentives.session.events import ToolInvoked
from weakincentives.session.participant import Participant
from weakincentives.session.session import Session, Snapshot
from weakincentives.session.slices import SlicePolicy, slice_policy
from weakincentives.tool_result import ToolResult

_MAX_POINTS = 200
"""Calls whose session state can be undone; the history of files is on disk."""


_MAX_PATHS = 10
"""Files listed for one call."""


@dataclass(frozen=True, slots=True)
class UndoParams:
    call_id: str | None = None
    """Undo this call, by its id in `history`. By default the last one that changed something and is
    not undone yet."""
    and_later: bool = False
    """Undo everything after that call, too."""
    checkpoint: str | None = None
    """Return to this checkpoint instead: everything after it is undone."""


@dataclass(frozen=True, slots=True)
class Undone:
    """The calls that were undone."""

    calls: tuple[str, ...]
    """Their ids, newest first."""
    tools: tuple[str, ...]
    """The tools that they called."""
    notes: tuple[str, ...] = ()
    """What could not be undone."""

    def render(self) -> str:
        made = ", ".join(self.tools)
        many = "1 call" if len(self.calls) == 1 else f"{len(self.calls)} calls"
        return "\n".join([f"Undone: {many} ({made}).", *self.notes])


@dataclass(frozen=True, slots=True)
class CheckpointParams:
    name: str
    """A name for the current state. It replaces an earlier checkpoint of the same name."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A named state."""

    name: str

    def render(self) -> str:
        return f'To return here, call `undo` with checkpoint "{self.name}".'


@slice_policy(SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class CheckpointState:
    """The session's state at a checkpoint, for another process to restore."""

    call_id: str
    state: str


@dataclass(frozen=True, slots=True)
class HistoryParams:
    limit: int = 20
    """How many of the newest calls to list."""
    call_id: str | None = None
    """Show what this call changed in files, as a diff."""


@dataclass(frozen=True, slots=True)
class CallSummary:
    call_id: str
    tool: str
    success: bool
    time: str
    paths: tuple[str, ...] = ()
    """The files that it changed, at most ten."""
    more: int = 0
    """How many other files it changed."""
    ignored: int = 0
    """How many files it changed that git ignores, or that are generated."""
    undone: bool = False
    checkpoint: str = ""

    def render(self) -> str:
        how = "undone" if self.undone else "ok" if self.success else "failed"
        about = f' "{self.checkpoint}"' if self.checkpoint else ""
        changed = f": {', '.join(self.paths)}" if self.paths else ""
        changed += f" and {self.more} more files" if self.more else ""
        changed += f" + {self.ignored} ignored files" if self.ignored else ""
        return f"{self.time} {self.call_id} {self.tool}{about} {how}{changed}"


@dataclass(frozen=True, slots=True)
class History:
    """The last calls, oldest first."""

    calls: tuple[CallSummary, ...]
    diff: str = ""

    def render(self) -> str:
        lines = [call.render() for call in self.calls] or ["No calls yet."]
        return self.diff or "\n".join(lines)


@dataclass(slots=True)
class _Point:
    """The state before a call, except files on disk: those have a history of their own."""

    session: Snapshot
    resources: dict[str, object]
    commits: dict[str, object]
    """How many calls each database has committed; its rows are undone by its own records."""
    changed: bool = True
    """Whether the call has changed any of it, as far as that is known."""
    is_shared: bool = False
    """Whether another call ran at the same time: then what it changed is not known."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The calls to undo, newest first, and the call whose state to restore."""

    undone: list[ToolInvoked]
    to: ToolInvoked
    """The oldest of them, or a checkpoint."""
    later: Sequence[ToolInvoked] = ()
    """Later calls, which are not undone."""


class _Past:
    """The calls of a session, and what they changed in files."""

    def __init__(self, context: ToolContext) -> None:
        files = context.resources.find(Filesystem)
        self.files = files if isinstance(files, HostFilesystem) else None
        history = () if self.files is None else self.files.history()
        self.paths = {each.call_id: each.paths for each in history}
        """The paths that calls have changed on disk."""
        self.undone = self.paths.keys() - not_undone(history)
        """The calls whose changes to files are undone now; `wink undo` can do that, too."""
        self.reaches: dict[str, Reach | None] = {}
        if context.rendering is not None:
            offers = context.rendering.offers
            self.reaches = {name: offer.tool.reach for name, offer in offers.items()}
        self._records = context.session[ToolInvoked]
        self.databases = [each for _, each in _databases(context) if each.may_record]

    def has_rows(self, call_id: str) -> bool:
        """Whether a call has changed rows that can be undone."""
        return any(
            each.has_committed(call_id) and each.changes([call_id]) for each in self.databases
        )

    def standing(self) -> Iterator[ToolInvoked]:
        """Yield the calls that succeeded and are not undone, newest first."""
        undone: set[str] = set()  # older calls that a later undo has undone
        for record in self._records.newest_first():
            value = record.result.value
            if record.call_id in undone:
                undone.remove(record.call_id)
            elif not (record.success and record.ran) or record.call_id in self.undone:
                continue
            elif isinstance(value, Undone):
                undone.update(value.calls)
            elif not (isinstance(value, Checkpoint) and undone):
                # A checkpoint is void when something before it was undone.
                yield record

    def undo_files(self, calls: list[str]) -> list[str]:
        """Undo what calls did to files; return a sentence for each thing that could not be."""
        if self.files is None or not calls:
            return []
        try:
            return list(self.files.undo(*calls))
        except UndoRefused as error:
            standing = {record.call_id for record in self.standing()}
            ours = {record.call_id for record in self._records}
            lines = ["Nothing was undone:"]
            for path, others in sorted(error.paths.items()):
                # A call that was undone, and its undo, leave a file unchanged.
                named = [call for call in others if call in standing or call not in ours]
                lines.append(f"{path} was changed since by {', '.join(named) or 'someone else'}")
            raise ToolValidationError("\n".join(lines)) from error


def _databases(context: ToolContext) -> list[tuple[str, Database]]:
    resources: Any = getattr(context.resources, "context", context.resources)
    named: Iterable[tuple[str, Any]] = getattr(resources, "snapshotables", ())
    return [(name, each) for name, each in named if isinstance(each, Database)]


def _undo_rows(calls: Sequence[str], past: _Past) -> list[str]:
    """Undo the rows of calls in the databases that record them; returns what was left."""
    notes: list[str] = []
    for each in past.databases:
        try:
            notes += each.undo(calls).notes
        except RowUndoRefused as error:
            raise ToolValidationError(f"Nothing was undone: {error}") from error
    return notes


class UndoTools:
    """The tools ``undo``, ``history`` and ``checkpoint`` for the calls of one session."""

    guide = (
        "Every call is a transaction: a failed call has changed nothing. `undo` undoes the last "
        "call that changed something, `checkpoint` names a state to return to, and `history` lists "
        "the calls."
    )

    def __init__(self, session: Session) -> None:
        self._session = session
        self._points: OrderedDict[str, _Point] = OrderedDict()
        self._running: set[str] = set()
        self.tools: tuple[Tool[Any, Any], ...] = (
            Tool[UndoParams, Undone](
                name="undo",
                description="Undo one call, by default the last that changed something, or "
                "everything since a call or a checkpoint: files and session state. Changes by "
                "others are never lost.",
                handler=self._undo,
                reach="reversible",
            ),
            Tool[HistoryParams, History](
                name="history",
                description="List the last calls and the files they changed, or show one diff.",
                handler=self._history,
                reach="read",
            ),
            Tool[CheckpointParams, Checkpoint](
                name="checkpoint",
                description="Name the current state of files and session, to return to it with "
                "`undo`.",
                handler=self._checkpoint,
                reach="reversible",
            ),
        )

    def before(self, call: ToolCall, offer: OfferedTool | None, context: ToolContext) -> None:
        """Remember the state before a call that may change it."""
        if offer is not None and offer.tool.reach != "read" and offer.tool not in self.tools:
            point = self._points[call.id] = _point(self._session, context)
            point.is_shared = bool(self._running)
            for other in self._running:
                self._points[other].is_shared = True
            self._running.add(call.id)
            self._trim()

    def _trim(self) -> None:
        """Forget the oldest points, but not those of calls under way."""
        too_many = len(self._points) - _MAX_POINTS
        ended = (call_id for call_id in self._points if call_id not in self._running)
        for call_id in list(islice(ended, max(too_many, 0))):
            del self._points[call_id]

    def abandon(self, call: ToolCall) -> None:
        """Forget a call that ended without a result: it was cancelled, and is rolled back."""
        self._running.discard(call.id)
        self._points.pop(call.id, None)

    def after(self, call: ToolCall, result: ToolResult[Any]) -> None:
        """Note whether the call has changed the state; forget a failed call."""
        self._running.discard(call.id)
        point = self._points.get(call.id)
        if point is None:
            return
        if result.success:
            point.changed = bool(point.resources or point.commits) or self._differs(point)
        else:
            del self._points[call.id]

    def _differs(self, point: _Point) -> bool:
        before, now = point.session.state, self._session.snapshot_here().state
        if before is now:
            return False
        # What policies remember is not a change that anyone wants to undo.
        return bool(before.keys() - now.keys()) or any(
            before.get(kind) is not values
            for kind, values in now.items()
            if kind not in (PolicyState, KnownFiles, CompletedTools)
        )

    @property
    def resources(self) -> tuple[McpResource, ...]:
        """The history and its diffs, for clients to read: under the policies of ``history``."""
        history = Tool[HistoryParams, History](
            name="history",
            title="History",
            description="The last calls and the files they changed.",
            handler=self._read_history,
            reach="read",
        )
        diff = Tool[HistoryParams, None](
            name="history",
            title="Changes",
            description="What the calls of this session changed in files and was not undone.",
            handler=self._read_diff,
            reach="read",
            max_result_chars=None,
        )
        one = Tool[HistoryParams, None](
            name="history",
            title="Changes of a call",
            description="What one call changed in files.",
            handler=self._read_call_diff,
            reach="read",
            max_result_chars=None,
        )
        kind = "text/x-diff"
        return (
            McpResource(uri="wink://history", tool=history, version=self._version),
            McpResource(uri="wink://diff", tool=diff, mime_type=kind, version=self._version),
            McpResource(
                uri="wink://calls/{call_id}/diff",
                tool=one,
                mime_type=kind,
                complete={"call_id": lambda value, others: self._changing_calls()},
            ),
        )

    def _version(self, context: ToolContext, uri: str) -> object:
        latest = self._session[ToolInvoked].latest()
        return None if latest is None else latest.call_id

    def _changing_calls(self) -> list[str]:
        return [each.call_id for each in self._session[ToolInvoked].newest_first() if each.success]

    # The tools

    def _read_history(self, params: HistoryParams, *, context: ToolContext) -> ToolResult[History]:
        return self._history(HistoryParams(limit=100), context=context)

    def _read_diff(self, params: HistoryParams, *, context: ToolContext) -> ToolResult[None]:
        past = _Past(context)
        standing = [each.call_id for each in past.standing() if each.call_id in past.paths]
        diffs = [] if past.files is None else [past.files.diff(each) for each in reversed(standing)]
        return ToolResult.ok(None, "".join(diffs))

    def _read_call_diff(self, params: HistoryParams, *, context: ToolContext) -> ToolResult[None]:
        found = self._history(params, context=context)
        if found.value is None:
            return ToolResult.error(found.message)
        return ToolResult.ok(None, found.value.diff)

    def _undo(self, params: UndoParams, *, context: ToolContext) -> ToolResult[Undone]:
        if params.checkpoint is not None and params.call_id is not None:
            return ToolResult.error("Name a call or a checkpoint, not both")
        past = _Past(context)
        chosen = self._chosen(params, past)
        if not chosen.undone:
            return ToolResult.error("Nothing has changed since: there is nothing to undo")
        ids = tuple(record.call_id for record in chosen.undone)
        notes = past.undo_files([each for each in ids if each in past.paths])
        notes += _undo_rows(ids, past)
        notes += self._restore_state(chosen, context)
        notes += [
            f"The effects of {record.tool_name} outside files and session are not undone."
            for record in chosen.undone
            if past.reaches.get(record.tool_name) in ("compensable", "irreversible")
        ]
        tools = tuple(record.tool_name for record in chosen.undone)
        return ToolResult.ok(Undone(ids, tools, tuple(dict.fromkeys(notes))))

    def _chosen(self, params: UndoParams, past: _Past) -> _Chosen:
        """Return the calls to undo; raise ToolValidationError if there are none."""
        later: list[ToolInvoked] = []
        checkpoints: dict[str, None] = {}
        for record in past.standing():
            value = record.result.value
            if isinstance(value, Checkpoint):
                if value.name == params.checkpoint:
                    return _Chosen(later, record)
                checkpoints[value.name] = None
            elif self._may_have_changed(record, past):
                # After a restart, only changes to files are certain.
                is_known = (
                    record.call_id in past.paths
                    or record.call_id in self._points
                    or past.has_rows(record.call_id)
                )
                is_it = is_known if params.call_id is None else record.call_id == params.call_id
                if is_it and params.checkpoint is None:
                    if params.and_later:
                        return _Chosen([*later, record], record)
                    return _Chosen([record], record, later)
                later.append(record)
        if params.checkpoint is not None:
            known = ", ".join(checkpoints) or "none"
            raise ToolValidationError(f"No checkpoint {params.checkpoint!r}. Checkpoints: {known}")
        if params.call_id is None:
            raise ToolValidationError("There is no change to undo")
        raise ToolValidationError(
            f"The call {params.call_id!r} changed nothing that can be undone; see the history"
        )

    def _may_have_changed(self, record: ToolInvoked, past: _Past) -> bool:
        if record.call_id in past.paths or past.has_rows(record.call_id):
            return True
        point = self._points.get(record.call_id)
        if point is not None:
            return point.changed
        return past.reaches.get(record.tool_name, "read") != "read"

    def _restore_state(self, chosen: _Chosen, context: ToolContext) -> list[str]:
        """Restore session and resources; return what could not be restored."""
        point = self._points.get(chosen.to.call_id)
        later = (self._points.get(record.call_id) for record in chosen.later)
        if any(each is not None and each.changed for each in later):
            if point is not None and not point.changed:
                return []  # it changed only files, and the later state must not be lost
            raise ToolValidationError(
                "Later calls have changed the session's state, too: undo those first, or pass "
                "and_later=true"
            )
        if point is not None and point.is_shared and point.changed:
            snapshot = None
        elif point is not None:
            snapshot = point.session
        elif isinstance(chosen.to.result.value, Checkpoint):
            snapshot = _saved_state(chosen.to.call_id, context.session)
        else:
            snapshot = None
        if snapshot is None or not context.session.can_restore(snapshot):
            return ["The session's state (such as plans) is not undone: it is no longer known."]
        context.session.restore(snapshot)
        if point is not None:
            resources: Any = context.resources
            for name, resource in resources.snapshotables:
                if name in point.resources:
                    token = point.resources[name]
                    if isinstance(resource, Participant):
                        resource.restore_here(token)
                    else:
                        resource.restore(token)
            return [
                f"Rows of {each.title} that were changed since are not undone: see its track()."
                for name, each in _databases(context)
                if not each.may_record and each.snapshot_here() != point.commits.get(name)
            ]
        return []

    def _checkpoint(
        self, params: CheckpointParams, *, context: ToolContext
    ) -> ToolResult[Checkpoint]:
        point = self._points[context.call_id] = _point(context.session, context)
        # State that has no JSON form is known only to this process.
        with suppress(SnapshotError):
            state = point.session.to_json(include_log=False)
            context.session.dispatch(CheckpointState(context.call_id, state))
        return ToolResult.ok(Checkpoint(params.name), f"Checkpoint: {params.name}")

    def _history(self, params: HistoryParams, *, context: ToolContext) -> ToolResult[History]:
        past = _Past(context)
        if params.call_id is not None:
            diff = ""
            if past.files is not None:
                with suppress(LookupError):
                    diff = past.files.diff(params.call_id)
            if not diff:
                return ToolResult.error(f"The call {params.call_id!r} changed no known file")
            return ToolResult.ok(History((), diff))
        calls: list[CallSummary] = []
        undone = set(past.undone)
        ignored = None if past.files is None else IgnoredFiles(past.files.root)
        records = context.session[ToolInvoked].newest_first()
        ended = (each for each in records if not each.suspended)
        for record in islice(ended, max(params.limit, 1)):
            value = record.result.value
            changed = past.paths.get(record.call_id, ())
            directories = {".", *(path.rpartition("/")[0] for path in changed)}
            paths = [path for path in changed if path not in directories]
            shown = [path for path in paths if ignored is None or not ignored(path)]
            calls.append(
                CallSummary(
                    call_id=record.call_id,
                    tool=record.tool_name,
                    success=record.success,
                    time=f"{datetime.fromtimestamp(record.timestamp, UTC):%Y-%m-%d %H:%M:%SZ}",
                    paths=tuple(shown[:_MAX_PATHS]),
                    more=max(len(shown) - _MAX_PATHS, 0),
                    ignored=len(paths) - len(shown),
                    undone=record.call_id in undone,
                    checkpoint=value.name if isinstance(value, Checkpoint) else "",
                )
            )
            if isinstance(value, Undone):
                undone.update(value.calls)
        return ToolResult.ok(History(tuple(reversed(calls))))


def _saved_state(call_id: str, session: Session) -> Snapshot | None:
    for saved in session[CheckpointState].newest_first():
        if saved.call_id == call_id:
            return Snapshot.from_json(saved.state)
    return None


def _point(session: Session, context: ToolContext) -> _Point:
    resources: Any = getattr(context.resources, "context", context.resources)
    named: Iterable[tuple[str, Any]] = getattr(resources, "snapshotables", ())
    tokens = {
        name: resource.snapshot_here() if isinstance(resource, Participant) else resource.snapshot()
        for name, resource in named
        # A snapshot of files would keep their history from being trimmed.
        if not isinstance(resource, (HostFilesystem, Database))
    }
    commits = {name: each.snapshot_here() for name, each in _databases(context)}
    return _Point(session.snapshot(), tokens, commits)
