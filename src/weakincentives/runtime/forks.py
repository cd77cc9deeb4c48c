"""Fork a run at one of its calls, on a branch of its own: to continue there, or to rerun the call.

A rerun replays everything before the call without asking the model: files, session and conversation
are exactly those of then. It keeps the model's turn, with other arguments for the call, or asks for
the turn again. Resuming the new run makes the calls that are open.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from weakincentives.core.call import new_call_id
from weakincentives.filesystem import Branch, drop_branch
from weakincentives.filesystem.store import location_of
from weakincentives.runtime.at import data_at, moment_of, outermost, talk_at
from weakincentives.runtime.calls import Call, Calls, Run, new_mark, new_run
from weakincentives.runtime.index import MESSAGES, RECORDS, fields_of
from weakincentives.runtime.saved import SavedSession
from weakincentives.runtime.stores.saves import INHERITED, SavedSessionData

RUN = "run"
"""What a branch says about itself: the mark of the run that it was made for."""
SECTIONS = "sections"
"""What is known of a run: texts that replace those of its prompt's sections, by path."""

Turn: TypeAlias = Literal["closed", "open", "again"]
"""What becomes of the turn that a call belongs to. ``closed``: calls that were not made yet are
answered as not made. ``open``: they are made when the run is resumed. ``again``: the model is asked
for the turn again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is different when a call is rerun. Without any change, the call is made once more."""

    arguments: Mapping[str, Any] | None = None
    """Of the call; None leaves the model's."""
    sections: Mapping[str, str] = field(default_factory=dict[str, str])
    """Texts of the prompt's sections, by path."""
    policies: Sequence[str] = ()
    """More rules, as for ``--policy``."""
    model: str = ""
    message: str = ""
    """What to tell the model: before the turn, or after its calls if it stays."""

    @property
    def turn(self) -> Turn:
        """Whether the turn stays: what only the model can see needs another turn of it."""
        if self.arguments is not None or self.policies:
            return "open"
        return "again" if self.sections or self.model or self.message else "open"


@dataclass(frozen=True, slots=True)
class Fork:
    """A branch, and the run that works on it."""

    workspace: Path
    branch: str
    run: Run | None
    """None if the call belongs to no run."""

    def discard(self) -> None:
        """Delete both: the run could not be started."""
        if self.run is not None:
            SavedSession.delete(self.run.path)
        drop_branch(self.workspace, self.branch)


def fork_call(
    calls: Calls, call: Call | None, *, name: str = "", before: bool = False, now: bool = False
) -> Fork:
    """Make a branch with the files at a call, and a run that continues there.

    Args:
        call: None for the files as they are now.
        name: Of the branch; by default a few letters.
        now: Take the files as they are now, with what a person has changed since the call.

    Raises:
        LookupError: The history no longer goes back that far.
        FilesystemError: There is a branch of this name, or it cannot have this name.
    """
    run = None if call is None else call.run
    where: dict[str, Any] = {}
    if call is not None:
        where = _place(calls, call, before=before, now=now)

    def make(branch: str, mark: str) -> Run | None:
        if run is None or call is None:
            return None
        about = {"branch": branch, "no_merge": True, "dry_run": False}
        return fork_run(run, call, before=before, about=about, mark=mark)

    return _forked(calls, name, "" if run is None or call is None else call.name, where, make)


def rerun_call(calls: Calls, call: Call, change: Change, *, name: str = "") -> Fork:
    """Make a branch with the files before a call, and a run that makes the call again, changed.

    Resume the run to make it. The branch is not merged.

    Raises:
        LookupError: No model asked for the call, or the history no longer goes back that far.
        ValueError: Calls of this kind of run cannot be made again.
        FilesystemError: There is a branch of this name, or it cannot have this name.
    """
    call = outermost(call)
    run = call.run
    if run is None or run.data.about.get("kind") != "run" or run.is_dry:
        raise ValueError(
            f"{call.name} cannot be rerun: it was made in a dry run, or not by `wink run`"
        )
    first = _first_of_turn(calls, call, run) if change.turn == "again" else call
    flags = dict(cast("Mapping[str, Any]", run.data.about.get("flags", {})))
    if change.policies:
        flags["policy"] = [*flags.get("policy", ()), *map(absolute, change.policies)]
    more: dict[str, object] = {}
    if change.model:
        flags["model"] = more["model"] = absolute(change.model)
    if change.sections:
        known = cast("Mapping[str, str]", run.data.about.get(SECTIONS, {}))
        more[SECTIONS] = {**known, **change.sections}

    def make(branch: str, mark: str) -> Run:
        about = {"branch": branch, "no_merge": True, "flags": flags, **more}
        arguments = change.arguments
        return fork_run(run, call, turn=change.turn, arguments=arguments, about=about, mark=mark)

    return _forked(calls, name, call.name, _place(calls, first, before=True), make)


def asked_arguments(call: Call) -> Mapping[str, Any]:
    """Return the arguments of a call as the model gave them; of a nested one, the outermost's.

    Raises:
        LookupError: No model asked for the call.
        ValueError: They are not a JSON object.
    """
    call = outermost(call)
    if call.run is None:
        raise LookupError(f"no model asked for {call.name}: it belongs to no run")
    asked = call.run.messages.at(_turn_of(call, call.run)).tool_calls
    params = next(each.params for each in asked if each.id == call.call_id)
    given: object = json.loads(params) if isinstance(params, str) else params
    if not isinstance(given, Mapping):
        raise ValueError(f"the arguments of {call.name} are not a JSON object: give all of them")
    return cast("Mapping[str, Any]", given)


MODEL_FILES = ("local", "scripted")
"""The providers whose models are files."""


def absolute(named: str) -> str:
    """Return a model or rule with an absolute path: a run may be resumed from elsewhere."""
    kind, colon, file = named.partition(":")
    if kind in MODEL_FILES and file:
        return f"{kind}{colon}{Path(file).expanduser().absolute()}"
    if named.endswith(".toml") and "=" not in named:
        return str(Path(named).expanduser().absolute())
    return named


def _place(calls: Calls, call: Call, *, before: bool, now: bool = False) -> dict[str, Any]:
    """Return where a branch begins, as ``Branch.create`` takes it."""
    branch, serial = calls.place_of(call, before=before)
    if branch:
        return {"of": calls.branches[branch], "commits": serial}
    return {} if now else {"at": serial}


def _forked(
    calls: Calls,
    name: str,
    source: str,
    where: Mapping[str, Any],
    make: Callable[[str, str], Run | None],
) -> Fork:
    """Make a branch and a run of it, both or neither; ``source`` names the call."""
    mark = new_mark(location_of(calls.workspace))
    about = {RUN: mark, "forked_from": source} if source else {}
    branch = Branch.create(calls.workspace, name or mark, about=about, **where)
    try:
        with branch:
            return Fork(calls.workspace, branch.name, make(branch.name, mark))
    except BaseException:
        drop_branch(calls.workspace, branch.name)
        raise


# The session and the conversation


def fork_run(
    run: Run,
    call: Call,
    *,
    before: bool = False,
    turn: Turn = "closed",
    arguments: Mapping[str, Any] | None = None,
    about: Mapping[str, object] | None = None,
    mark: str = "",
) -> Run:
    """Return a new run, to be continued from just after a call of another, or before it.

    It has the session and the conversation of then, and a file of its own. Of the turn that the
    call belongs to, calls that were not made yet are answered as not made. ``about`` adds to what
    is known of the run.

    With ``turn="open"``, it is continued before the call: those before it in the turn are answered
    as recorded, it and those after it are made when the run is resumed, under other ids, and the
    call itself with other ``arguments`` if there are any. With ``turn="again"``, it is continued
    before the turn.

    Raises:
        LookupError: No model asked for the call, so it has no turn.
    """
    if turn == "closed":
        data, changed = _closed(run, call, before=before)
    elif turn == "open":
        data, changed = _opened(run, call, arguments)
    else:
        until, changed = (MESSAGES, _turn_of(outermost(call), run)), {}
        data = run.data.back_to(until, through=False)
    forked = new_run(run.path.parent.parent, mark)
    data.fork(
        run.path,
        forked.path,
        session_id=forked.id,
        about={
            **data.about,
            "forked_from": f"{run.id}/{outermost(call).number}",
            INHERITED: len(data.log.get(RECORDS, ())),
            **(about or {}),
        },
        **changed,
    )
    return forked


def _closed(run: Run, call: Call, *, before: bool) -> tuple[SavedSessionData, dict[str, Any]]:
    """Return what was saved of a run at a call, and what closes the turn."""
    data = data_at(call, run, before=before)
    known = len(data.log.get(MESSAGES, ()))
    talk = talk_at(moment_of(call), run.messages, run.index, known, before=before)
    own = [*filter(talk.is_of, run.messages)]
    has = len(own) - sum(map(talk.is_of, run.messages.newer_than(known)))
    added = [*own[has : talk.as_of], *talk.not_made_answers()]
    if talk.as_of < has:
        added.insert(0, talk.mark())
    return data, {"added": {MESSAGES: added}} if added else {}


def _opened(
    run: Run, call: Call, arguments: Mapping[str, Any] | None
) -> tuple[SavedSessionData, dict[str, Any]]:
    """Return what was saved of a run before a call, and its turn with the changed call."""
    call = outermost(call)
    data, place = data_at(call, run, before=True), _turn_of(call, run)
    asked = run.messages.at(place)
    made = [each.id for each in asked.tool_calls].index(call.call_id)
    left = [replace(each, id=new_call_id()) for each in asked.tool_calls[made:]]
    if arguments is not None:
        left[0] = replace(left[0], params=dict(arguments))
        # It has the arguments, or a signature of them: the adapter makes it from the calls.
        asked = replace(asked, wire=None)
    asked = replace(asked, tool_calls=(*asked.tool_calls[:made], *left))
    return data, {"replaced": (MESSAGES, place, asked)}


def _turn_of(call: Call, run: Run) -> int:
    """Return the place of the message that asks for a call."""
    place = run.index.asked.get(call.call_id)
    if place is None:
        raise LookupError(f"no model asked for {call.name} {call.tool}: it cannot be rerun")
    return place


def _first_of_turn(calls: Calls, call: Call, run: Run) -> Call:
    """Return the first call that was made of the turn of a call."""
    ids = {each.id for each in run.messages.at(_turn_of(call, run)).tool_calls}
    first = next(each for each in calls.of_run(run) if each.call_id in ids)
    inherited = run.data.log.get(RECORDS, ())[: run.inherited]
    if any(fields_of(each).get("call_id") in ids for each in inherited):
        source = run.data.about.get("forked_from")
        raise LookupError(f"the turn of {call.name} began in {source}: rerun it there")
    return first
