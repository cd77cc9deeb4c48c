"""One commit record for a call in a saved session, and what to redo from it after a kill.

Such a call is committed by one record. If it changed files on disk, that is the record in the
history of the workspace or branch; otherwise, if it reached outside, its entry in the ledger;
otherwise the line in the session's file. The first two hold the lines that the session's file gets
next, with the call's answer and outcome. A kill before the record leaves nothing of the call. After
a kill behind it, ``redo_missing`` completes the session's file and the ledger.
"""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from weakincentives.core.call import new_id
from weakincentives.errors import RowUndoRefused
from weakincentives.filesystem.redo import Redo, forget
from weakincentives.filesystem.redo import kept as kept_redos
from weakincentives.runtime.ledger import CallOutcome
from weakincentives.runtime.rows import KeptCall

if TYPE_CHECKING:
    from weakincentives.filesystem import HostFilesystem
    from weakincentives.filesystem.history import Committed
    from weakincentives.runtime.ledger import OutcomeLedger
    from weakincentives.runtime.rows import RowHistory
    from weakincentives.runtime.saved import Encoding, SavedSession
    from weakincentives.runtime.transactions import Transaction
    from weakincentives.session.participant import Participant
    from weakincentives.session.session import Snapshot

_SOON = 1.0
"""Seconds after its end in which a call is normally committed."""


# Commit


def commit_saved(transaction: Transaction, record: object, saver: SavedSession) -> None:
    """Commit a call whose session is saved: files, session, answer and outcome with one record.

    What can fail comes before that record, and its place in memory right after it.
    """
    views = transaction.views_to_merge()
    for _, base, view in views:
        if not base.journalled and not base.commits_last:
            transaction.merge(base, view)
    last = [each for each in views if each[1].commits_last]
    on_disk = [(base, view) for _, base, view in views if base.journalled]
    with saver.encoding(transaction.call.id) as encoding:

        def first(after: Snapshot) -> bool:
            encoding.after = after
            keep_in_databases(transaction, last, saver, encoding, on_disk)
            transaction.merge_last(last)
            _write_record(transaction, on_disk, encoding)
            return encoding.is_done

        transaction.base.settle(
            transaction.session, keep=True, record=record, transaction=transaction, first=first
        )


def keep_in_databases(
    transaction: Transaction,
    last: Sequence[tuple[str, Participant, Participant]],
    saver: SavedSession,
    encoding: Encoding | None = None,
    on_disk: Sequence[tuple[Participant, Participant]] = (),
) -> None:
    """Have each database keep, in its own transaction, what is to follow its commit."""
    files = any(view.changed_here() for _, view in on_disk) if last else False
    for place, (_, _, view) in enumerate(last):
        later = tuple(title_of(base) for _, base, _ in last[place + 1 :])

        def keep(later: tuple[str, ...] = later) -> KeptCall | None:
            redo = None if encoding is None else encoding.redo()
            return KeptCall(
                session=saver.file_id,
                at=saver.position if redo is None else redo.at,
                saved=saver.position,
                call_id=transaction.call.id,
                tool=transaction.call.name,
                redo=_text(redo),
                files=files,
                later=later,
            )

        view.commit_with(keep)


def title_of(database: object) -> str:
    return str(getattr(database, "title", type(database).__name__))


def _write_record(
    transaction: Transaction,
    on_disk: Sequence[tuple[Participant, Participant]],
    encoding: Encoding,
) -> None:
    holder = _holder(on_disk)
    ledger, outcome = transaction.ledger, transaction.outcome
    if ledger is not None and outcome is not None and holder is None:
        # There is no record of the files, so the answer is on record before they are committed.
        files = any(view.changed_here() for _, view in on_disk)
        ledger.answer(replace(outcome, files=files, redo="" if files else _text(encoding.redo())))
    for base, view in on_disk:
        if view is not holder:
            transaction.merge(base, view)
    if holder is None:
        return
    base = next(base for base, view in on_disk if view is holder)
    holder.commit_with(encoding.redo)
    transaction.merge(base, holder)
    if ledger is not None and outcome is not None and not encoding.is_asked:
        ledger.answer(replace(outcome, redo=_text(encoding.redo())))


def _holder(on_disk: Sequence[tuple[Participant, Participant]]) -> Participant | None:
    """Return the view whose commit record is that of the call; it is merged last."""
    able = [view for base, view in on_disk if base.holds_redo]
    if len(able) > 1:
        able = [view for view in able if view.changed_here()] or able
    return able[-1] if able else None


def _text(redo: Redo | None) -> str:
    return "" if redo is None else json.dumps(redo.encode())


# Redo


def redo_in_databases(
    saved: SavedSession, files: HostFilesystem | None, databases: Sequence[RowHistory]
) -> tuple[list[Redo], list[tuple[KeptCall, str]]]:
    """Settle what databases keep of calls that the session does not have.

    A call whose other parts have all committed happened: what its session lacks is returned.
    Otherwise its rows are undone, so that it did not happen. If they cannot be undone, the call
    is returned with a sentence.
    """
    redos: list[Redo] = []
    unknown: list[tuple[KeptCall, str]] = []
    by_title = {each.title: each for each in databases}
    # All of them first: each waits for what the killed process was still doing there.
    all_kept = [(each, each.kept(saved.file_id)) for each in databases]
    for database, of_calls in all_kept:
        for kept in of_calls:
            if kept.call_id in saved.index.made:
                continue  # it is saved; the next call of the session forgets it
            if missing := [title for title in kept.later if title not in by_title]:
                unknown.append((kept, f"{missing[0]} is needed to tell whether it committed"))
                continue
            lacks = [
                title for title in kept.later if not by_title[title].has_committed(kept.call_id)
            ]
            if kept.files and not _has_files(saved, files, kept.call_id):
                lacks.append("files")
            if kept.redo and not lacks:
                redos.append(Redo.decode(json.loads(kept.redo)))
                continue
            left = _undo_rows(database, kept)
            if left:
                what = ", ".join(lacks) or "the session"
                unknown.append((kept, f"{left}; what it changed in {what} is lost"))
    return redos, unknown


def _has_files(saved: SavedSession, files: HostFilesystem | None, call_id: str) -> bool:
    newest = () if files is None else unsaved_commits(files.newest_first(), saved.index.made)
    return any(each.call_id == call_id for each in newest)


def _undo_rows(database: RowHistory, kept: KeptCall) -> str:
    """Undo the rows of a call that did not happen; return why some of them stay, if so."""
    is_complete = database.records_every_table
    try:
        undone = database.undo([kept.call_id], call_id=f"undo_{new_id()[:12]}")
    except RowUndoRefused as error:
        return f"its rows in {database.title} stay: {error}"
    database.settle(kept)
    if undone.notes:
        return f"not all of its rows in {database.title} are undone: {'; '.join(undone.notes)}"
    return "" if is_complete else f"its rows in {database.title} stay: they are not tracked"


def redo_missing(
    saved: SavedSession,
    files: HostFilesystem,
    ledger: OutcomeLedger,
    in_databases: Iterable[Redo] = (),
) -> None:
    """Complete the file of a session, and the ledger, from the records of its commits."""
    answered = ledger.redos(saved.file_id, saved.size)
    found = [*answered, *in_databases, *kept_redos(files.store, saved.file_id)]
    for commit in unsaved_commits(files.newest_first(), saved.index.made):
        redo = files.redo_of(commit)
        if redo is not None and redo.session == saved.file_id:
            found.append(redo)
    found.sort(key=lambda each: each.at)
    saved.append_missing(found)
    for each in found:
        forget(files.store, each)
    made = saved.index.made
    for each in answered:
        outcome = ledger.find(each.call_id)
        if each.call_id in made and outcome is not None:
            ledger.end(outcome)
    _settle(saved, ledger)


def _settle(saved: SavedSession, ledger: OutcomeLedger) -> None:
    """Enter the outcomes that the session has and the ledger lacks."""
    open_calls = {each.call_id for each in ledger.unsettled()}
    if not open_calls:
        return
    for each in saved.session.read_slice(CallOutcome).newest_first():
        if each.call_id in open_calls:
            open_calls.discard(each.call_id)
            if each.outcome != "unknown":
                ledger.end(each)


def unsaved_commits(
    newest_first: Iterable[Committed], made: Mapping[str, tuple[float, float]]
) -> Generator[Committed]:
    """Yield the newest commits, up to one that is on record: all older ones are, too.

    The calls of a session are committed and recorded in the same order.
    """
    for each in newest_first:
        yield each
        began, end = made.get(each.call_id, (math.inf, 0.0))
        # An id may be used again: then another commit has it, at another time.
        if began <= each.time <= end + _SOON:
            return
