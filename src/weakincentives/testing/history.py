"""Whether calls that ran at the same time came out as if they had run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeAlias, TypeVar

from weakincentives.call import transaction_under_way
from weakincentives.runtime.events import ToolInvoked
from weakincentives.runtime.session import Session
from weakincentives.runtime.transactions import Transaction

T = TypeVar("T")

_Path: TypeAlias = tuple[Transaction, ...]
"""An attempt at a call, after those it is nested in."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    """Where what calls saw or left differs from running them one after the other.

    Its name is one of ``lost update`` (a call overwrote what another had written and it had not
    seen), ``dirty read`` (it saw what was not kept, or not yet), ``write skew`` (two calls each
    changed what the other had read), ``stale read`` (it saw what another had changed already),
    ``unexplained read`` (it saw what nobody wrote) and ``wrong final state``.
    """

    name: str
    key: Hashable
    seen: object
    expected: object
    calls: tuple[str, ...] = ()
    """The ids of the calls that are involved, the one that went wrong first."""
    text: str = ""
    """What happened, in one sentence."""

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


@dataclass(frozen=True, slots=True)
class _Operation:
    """What a call did to a key, and in which attempt."""

    path: _Path
    key: Hashable
    value: object = None
    """What was read or written."""
    change: Callable[[Any], object] | None = None
    is_read: bool = False

    def applied_to(self, value: object) -> object:
        return self.value if self.change is None else self.change(value)


@dataclass(slots=True)
class _Taken:
    """One attempt at a call: its operations, and the calls nested in it where they began."""

    transaction: Transaction
    record: ToolInvoked | None
    order: int
    """The place of its record among all; a call without one comes last."""
    steps: list[_Operation | _Taken] = field(default_factory=list["_Operation | _Taken"])

    @property
    def is_last(self) -> bool:
        """Whether it counts, and was not taken again because of what others had changed."""
        return self.record is not None and self.record.attempts == self.transaction.attempt

    @property
    def is_kept(self) -> bool:
        return self.transaction.committed

    @property
    def id(self) -> str:
        return self.transaction.call.id

    @property
    def name(self) -> str:
        place = None if self.record is None else self.record.place
        at = "" if place is None else f" at place {place}"
        return f"call {self.id} of '{self.transaction.call.name}'{at}"

    def in_order(self) -> Iterator[_Operation | _Taken]:
        """Yield the steps; neighbouring calls that are nested in this one in their own order."""
        for _, steps in groupby(self.steps, lambda step: isinstance(step, _Taken)):
            yield from sorted(steps, key=_order)

    def operations(self) -> Iterator[_Operation]:
        for step in self.steps:
            if isinstance(step, _Taken):
                yield from step.operations()
            else:
                yield step

    def changes(self) -> Iterator[_Operation]:
        """Yield the writes of this call and of those nested in it that were kept."""
        for step in self.in_order():
            if not isinstance(step, _Taken):
                if not step.is_read:
                    yield step
            elif step.is_kept:
                yield from step.changes()

    def reads(self, key: Hashable) -> bool:
        return any(each.is_read and each.key == key for each in self.operations())

    def writes(self, key: Hashable) -> bool:
        return any(each.key == key for each in self.changes())


def _order(step: _Operation | _Taken) -> int:
    return step.order if isinstance(step, _Taken) else 0


class History:
    """What calls read and wrote, to check that running them together made no difference.

    Handlers tell it what they do; it finds out by itself which call they belong to, and which
    attempt at it. Safe to use from several threads.

    >>> history = History()
    >>> async def bump(params, *, context):
    ...     count = history.read("count", len(context.session[int]))
    ...     history.wrote("count", count + 1)
    """

    def __init__(self) -> None:
        self._operations: list[_Operation] = []

    def read(self, key: Hashable, value: T) -> T:
        """Note that the call under way has read this; returns the value."""
        self._operations.append(_Operation(_path(), key, value, is_read=True))
        return value

    def wrote(self, key: Hashable, value: object) -> None:
        """Note that the call under way has set this, whatever was there."""
        self._operations.append(_Operation(_path(), key, value))

    def updated(self, key: Hashable, change: Callable[[Any], object]) -> None:
        """Note that the call under way has changed this without looking: ``change(old) -> new``.

        For what a reducer makes of an event, and for appending.
        """
        self._operations.append(_Operation(_path(), key, change=change))

    def check(
        self,
        session: Session,
        *,
        initial: Mapping[Hashable, object] | None = None,
        final: Mapping[Hashable, object] | None = None,
        logged: Container[Hashable] = (),
    ) -> Anomaly | None:
        """Return the first difference from running the calls one after the other, or None.

        The calls are taken in the order of their records in the session. What was not kept
        changes nothing, but what it saw is checked as well.

        Args:
            initial: Values before the first call; a key that is not in it begins as None.
            final: Values afterwards, as far as they are to be compared.
            logged: Keys of which changes stay when a call fails, as in LOG slices.
        """
        return _Replay(self._calls(session), logged).run(initial or {}, final or {})

    def _calls(self, session: Session) -> list[_Taken]:
        """Return all attempts at outermost calls, in the order of the records."""
        records = {r.call_id: (r, n) for n, r in enumerate(session[ToolInvoked].all())}
        known: dict[_Path, _Taken] = {}
        outermost: list[_Taken] = []
        for operation in self._operations:
            siblings: list[Any] = outermost
            for depth in range(1, len(operation.path) + 1):
                path = operation.path[:depth]
                call = known.get(path)
                if call is None:
                    record, order = records.get(path[-1].call.id, (None, len(records)))
                    call = known[path] = _Taken(path[-1], record, order)
                    siblings.append(call)
                siblings = call.steps
            siblings.append(operation)
        return sorted(outermost, key=_order)


def _path() -> _Path:
    transaction = transaction_under_way.get()
    if transaction is None:
        raise RuntimeError(
            "a history is told from inside a call: in a thread that a handler starts, run it "
            "with contextvars.copy_context().run"
        )
    return transaction.lineage


class _Found(Exception):
    def __init__(self, anomaly: Anomaly) -> None:
        self.anomaly = anomaly


class _Replay:
    """Runs the kept calls one after the other on plain values, and compares what they saw."""

    def __init__(self, calls: list[_Taken], logged: Container[Hashable]) -> None:
        self._calls = calls
        self._logged = logged
        self._versions: dict[Hashable, list[tuple[object, _Taken | None]]] = {}
        """By key, what the outermost calls left there one after the other, and which."""

    def run(
        self, initial: Mapping[Hashable, object], final: Mapping[Hashable, object]
    ) -> Anomaly | None:
        values = dict(initial)
        self._versions = {key: [(value, None)] for key, value in initial.items()}
        try:
            for call in self._calls:
                # A call that was interrupted has not come to its place, and answered nothing.
                if call.is_last and not _is_interrupted(call.record):
                    before = dict(values)
                    self._replay(call, values, call)
                    for key, value in values.items():
                        if value != before.get(key):
                            self._versions.setdefault(key, [(None, None)]).append((value, call))
            for key, value in final.items():
                if values.get(key) != value:
                    raise _Found(self._left(key, value, values.get(key)))
        except _Found as found:
            return found.anomaly
        return None

    def _replay(self, call: _Taken, values: dict[Hashable, object], outermost: _Taken) -> None:
        before = dict(values)
        for step in call.in_order():
            if isinstance(step, _Taken):
                if step.is_last:
                    self._replay(step, values, outermost)
            elif not step.is_read:
                values[step.key] = step.applied_to(values.get(step.key))
            elif values.get(step.key) != step.value:
                raise _Found(self._misread(outermost, call, step, values.get(step.key)))
        if not call.is_kept:
            logged = {key: value for key, value in values.items() if key in self._logged}
            values.clear()
            values.update({**before, **logged})

    # Which anomaly it is

    def _misread(
        self, outermost: _Taken, call: _Taken, read: _Operation, expected: object
    ) -> Anomaly:
        key, seen = read.key, read.value
        saw = f"{call.name} read {key!r} as {seen!r}"

        def anomaly(name: str, text: str, *others: _Taken) -> Anomaly:
            calls = (call.id, *(other.id for other in others))
            return Anomaly(name, key, seen, expected, calls, text)

        versions = self._versions.get(key, [(None, None)])
        past = max((n for n, (value, _) in enumerate(versions) if value == seen), default=-1)
        if past < 0:
            writer = self._writer(outermost, key, seen)
            if writer is None:
                text = f"{saw}, which nobody wrote; one after the other it is {expected!r}"
                return anomaly("unexplained read", text)
            why = "had changed it again before its end"
            if not writer.is_kept:
                why = "was not kept"
            elif writer.order > outermost.order:
                why = "comes after it"
            text = f"{saw}, as {writer.name} wrote it, which {why}; it should be {expected!r}"
            return anomaly("dirty read", text, writer)
        since = [by for _, by in versions[past + 1 :] if by is not None]
        if not since:  # its own write, or that of a call nested in it, is missing
            return anomaly("stale read", f"{saw} after it had itself made it {expected!r}")
        made = f"{since[-1].name} had made it {expected!r} before"
        if not outermost.is_kept:
            return anomaly("stale read", f"{saw}, but {made}", since[-1])
        if outermost.writes(key):
            return anomaly("lost update", f"{saw} and wrote it, but {made}", since[-1])
        for other in since:
            for change in outermost.changes():
                if other.reads(change.key):
                    text = (
                        f"{saw} and wrote {change.key!r}, while {other.name} read "
                        f"{change.key!r} and wrote {key!r}; it should be {expected!r}"
                    )
                    return anomaly("write skew", text, other)
        return anomaly("stale read", f"{saw}, but {made}", since[-1])

    def _writer(self, reader: _Taken, key: Hashable, value: object) -> _Taken | None:
        """Return another call, kept or not, that wrote this value."""
        for call in self._calls:
            writes = (op for op in call.operations() if op.key == key and not op.is_read)
            if call is not reader and any(op.change is None and op.value == value for op in writes):
                return call
        return None

    def _left(self, key: Hashable, seen: object, expected: object) -> Anomaly:
        text = f"{key!r} is {seen!r} in the end; one after the other it is {expected!r}"
        for call in self._calls:
            if call.is_kept and call.writes(key) and self._without(call, key) == seen:
                text += f", and without {call.name} it would be {seen!r}"
                return Anomaly("lost update", key, seen, expected, (call.id,), text)
        return Anomaly("wrong final state", key, seen, expected, text=text)

    def _without(self, left_out: _Taken, key: Hashable) -> object:
        """Return what a key would be in the end, had one call not been there."""
        value = self._versions[key][0][0]
        for call in self._calls:
            if call.is_kept and call is not left_out:
                for change in call.changes():
                    if change.key == key:
                        value = change.applied_to(value)
        return value


def _is_interrupted(record: ToolInvoked | None) -> bool:
    failure = None if record is None else record.result.failure
    return failure is not None and failure.code == "INTERRUPTED"
