"""Rewind a run to one of its calls: files, session and conversation together.

A rewind is a call of the run itself. So it is in the log, and rewinding to before it undoes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal, TypeAlias

from weakincentives.core import locks
from weakincentives.core.call import ToolCall
from weakincentives.errors import UndoRefused
from weakincentives.filesystem import Committed, HostFilesystem
from weakincentives.runtime.at import serial_at, talk_at
from weakincentives.runtime.conversation import Message, last_conversation
from weakincentives.runtime.index import RECORDS, CallIndex, CallPosition
from weakincentives.runtime.rows import RowHistory, UndoneRows, notes_on, undoing_rows
from weakincentives.runtime.saved import SavedSession
from weakincentives.session.events import ToolInvoked
from weakincentives.session.session import Snapshot
from weakincentives.tool_result import ToolResult

REWIND = "wink rewind"
"""The name in the log. No tool can have it."""

Parts: TypeAlias = Literal["all", "files", "conversation"]
"""What a rewind moves. The session belongs to the conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewound:
    """A rewind that was made."""

    call_id: str
    """Its own id in the log."""
    number: int
    """Its own number in the run."""
    undone: tuple[Committed, ...]
    """What it undid in the history, newest first."""
    notes: tuple[str, ...]
    """A sentence for each file that differs from then, for example because a person edited it."""
    rows: Sequence[tuple[RowHistory, UndoneRows]] = ()


def rewind_run(
    saved: SavedSession,
    files: HostFilesystem,
    number: int,
    *,
    before: bool = False,
    parts: Parts = "all",
    force: bool = False,
    databases: Sequence[RowHistory] = (),
) -> Rewound:
    """Go back to just after the call with this number, or before it.

    Of files and rows, what this run has changed since is undone, and what it has undone since is
    redone: so it also goes forward again. What someone else has edited since is left alone and
    named. All STATE slices and the conversation are as they were then; records stay, and so do
    effects outside. A rewind that is killed has not happened: resuming the run undoes its part.
    Costs what has happened since the call, however long the run is.

    Raises:
        IndexError: There is no such call.
        LookupError: The history no longer goes back that far.
        UndoRefused: Other calls have changed the same files since. Nothing was rewound. ``force``
            replaces their changes, and edits; the history keeps what they hold.
        RowUndoRefused: A rule of a database is in the way. Nothing was rewound.
    """
    saved.recover(files, databases=databases)
    moment = saved.moment(number)
    undone: tuple[Committed, ...] = ()
    if parts != "conversation":
        undone = since(moment, saved.index, files.newest_first(), before=before)
    own = ToolCall(
        REWIND,
        {
            "before" if before else "to": f"{saved.mark}/{number}",
            **({} if parts == "all" else {"only": parts}),
        },
        # With the mark of the run: a kill before it is recorded lets `recover` undo it.
        f"{saved.mark}:rewind_{os.urandom(4).hex()}",
    )
    # Read first: what cannot be read must not leave the files rewound without the rest.
    state = None if parts == "files" else _session_at(saved, moment, before=before)
    notes: tuple[str, ...] = ()
    began = saved.session.clock.time()
    later: list[str] = []
    if databases and parts != "conversation":
        records = saved.session.read_slice(ToolInvoked)
        later = [each.call_id for each in records.newer_than(moment.number - before)]
    with locks.defer_interrupts():  # nor must Ctrl-C
        with undoing_rows(databases, later, own.id, force=force) as rows:
            if undone:
                notes = files.undo(*undone, force=force, leave_edits=True, call=own)
        notes += notes_on(rows)
        if state is not None:
            saved.session.restore(state[0])
            for message in state[1]:
                saved.session.dispatch(message)
        saved.record(own, ToolResult.ok(None, "\n".join(notes)), began)
        saved.save()
    made = len(saved.session[ToolInvoked])
    return Rewound(call_id=own.id, number=made, undone=undone, notes=notes, rows=rows)


def _session_at(
    saved: SavedSession, moment: CallPosition, *, before: bool
) -> tuple[Snapshot, list[Message]]:
    """Return all STATE slices at a call, and the messages that take the conversation back."""
    session = saved.session
    state, known = saved.state_at((RECORDS, moment.number - 1), through=not before)
    messages = session.read_slice(Message)
    talk = talk_at(moment, messages, saved.index, known, before=before)
    if talk.conversation:
        return state, [talk.mark(), *talk.not_made_answers()]
    now = last_conversation(session)
    return state, [
        Message(role="user", conversation=each.conversation, rewound_to=0) for each in now[:1]
    ]


# The files


def since(
    moment: CallPosition, own: CallIndex, newest_first: Iterable[Committed], *, before: bool
) -> tuple[Committed, ...]:
    """Return what to undo, newest first, so that a run's files are as at a call.

    That is what the run has committed since, and what has undone calls of the run since. An undo
    and the calls that it undid cancel out. Costs the commits since the call.

    Raises:
        LookupError: The history no longer goes back that far.
        UndoRefused: One of the undos has undone calls of other runs, too.
    """
    rest, read = iter(newest_first), list[Committed]()
    serial = serial_at(moment, own, _noted(rest, read), before=before)
    later = [each for each in read if each.serial > serial]
    if later and later[-1].serial > serial + 1:
        raise LookupError(f"the history no longer has what changed since {moment.name}")
    ids, known = own.first.keys(), {each.call_id for each in later}
    if not all(other in ids or other in known for each in later for other in each.undoes):
        later = [*read, *rest]  # an undo of an older undo: all of it decides whose it is
    undoes = _undone_by(later, ids)
    thread = {_OLDER}
    for each in reversed(later):
        inside = [other in thread for other in undoes[each.serial]]
        if each.call_id in ids or (inside and all(inside)):
            thread.add(each.serial)
        elif any(inside) and each.serial > serial:
            raise UndoRefused(dict.fromkeys(each.paths, (each.call_id,)))
    left = {each.serial: each for each in later if each.serial > serial and each.serial in thread}
    for each in list(left):
        others = undoes[each]
        if each in left and others and all(other in left for other in others):
            for other in (each, *others):
                del left[other]
    return tuple(left.values())


_OLDER, _FOREIGN = 0, -1
"""In place of the serial of a commit that was not read: of the run, or of another."""


def _noted(entries: Iterable[Committed], read: list[Committed]) -> Iterator[Committed]:
    for each in entries:
        read.append(each)
        yield each


def _undone_by(newest_first: Sequence[Committed], own: Set[str]) -> Mapping[int, tuple[int, ...]]:
    """Return the serials that each commit has undone; an id may have been committed repeatedly."""
    newest: dict[str, int] = {}
    found: dict[int, tuple[int, ...]] = {}
    for each in reversed(newest_first):
        found[each.serial] = tuple(
            newest.get(other, _OLDER if other in own else _FOREIGN) for other in each.undoes
        )
        newest[each.call_id] = each.serial
    return found
