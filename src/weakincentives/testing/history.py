"""Whether concurrent calls came out as if they had run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeAlias, TypeVar

from weakincentives.core.call import transaction_under_way
from weakincentives.runtime.transactions import Transaction
from weakincentives.session.events import ToolInvoked
from weakincentives.session.session import Session

T = TypeVar("T")

_Path: TypeAlias = tuple[Transaction, ...]
"""An attempt at a call, after those it is nested in."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    """Where what calls saw or left differs from running them one after the other.

    Its name is one of ``lost update`` (a call overwrote a change that it had not seen), ``dirty
    read`` (it saw a value that was rolled back, or not yet committed), ``write skew`` (two calls
    each changed what the other had read), ``stale read`` (it saw a value that another call had
    already changed), ``unexplained read`` (it saw a value that no call wrote) and ``wrong final
    state``.
    """

    name: str
    key: Hashable
    seen: object
    expected: object
    calls: tuple[str, ...] = ()
    """The ids of the calls involved, the one that went wrong first."""
    text: str = ""
    """What happened, in one sentence."""

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


@dataclass(frozen=True, slots=True)
class _Operation:
    """A read or a write of a key."""

    path: _Path
    key: Hashable
    value: object = None
    """What was read or written."""
    change: Callable[[Any], object] | None = None
    is_read: bool = False

    def applied_to(self, value: object) -> object:
        return self.value if self.change is None else self.change(value)


@dataclass(slots=True)
class _Attempt:
    """One attempt at a call: its operations, and the calls nested in it, in order of beginning."""

    transaction: Transaction
    record: ToolInvoked | None
    order: int
    """The position of its record; a call without one comes last."""
    steps: list[_Operation | _Attempt] = field(default_factory=list["_Operation | _Attempt"])

    @property
    def is_last(self) -> bool:
        """Whether no later attempt replaced it."""
        return self.record is not None and self.record.attempts == self.transaction.runs

    @property
    def is_interrupted(self) -> bool:
        failure = None if self.record is None else self.record.result.failure
        return failure is not None and failure.code == "INTERRUPTED"

    @property
    def is_committed(self) -> bool:
        return self.transaction.committed

    @property
    def id(self) -> str:
        return self.transaction.call.id

    @property
    def name(self) -> str:
        place = None if self.record is None else self.record.place
        at = "" if place is None else f" at place {place}"
        return f"call {self.id} of '{self.transaction.call.name}'{at}"

    def in_order(self) -> Iterator[_Operation | _Attempt]:
        """Yield the steps; consecutive nested calls in the order of their records."""
        for _, steps in groupby(self.steps, lambda step: isinstance(step, _Attempt)):
            yield from sorted(steps, key=_order)

    def operations(self) -> Iterator[_Operation]:
        for step in self.steps:
            if isinstance(step, _Attempt):
                yield from step.operations()
            else:
                yield step

    def changes(self) -> Iterator[_Operation]:
        """Yield the writes of this call and of the committed calls nested in it."""
        for step in self.in_order():
            if not isinstance(step, _Attempt):
                if not step.is_read:
                    yield step
            elif step.is_committed:
                yield from step.changes()

    def reads(self, key: Hashable) -> bool:
        return any(each.is_read and each.key == key for each in self.operations())

    def writes(self, key: Hashable) -> bool:
        return any(each.key == key for each in self.changes())


def _order(step: _Operation | _Attempt) -> int:
    return step.order if isinstance(step, _Attempt) else 0


class History:
    """The reads and writes of calls, to check that running them concurrently made no difference.

    Handlers report what they do; the history finds the call and the attempt. Thread-safe.

    >>> history = History()
    >>> async def bump(params, *, context):
    ...     count = history.read("count", len(context.session[int]))
    ...     history.wrote("count", count + 1)
    """

    def __init__(self) -> None:
        self._operations: list[_Operation] = []

    def read(self, key: Hashable, value: T) -> T:
        """Note that the current call has read this, and return the value."""
        self._operations.append(_Operation(_path(), key, value, is_read=True))
        return value

    def wrote(self, key: Hashable, value: object) -> None:
        """Note that the current call has set this."""
        self._operations.append(_Operation(_path(), key, value))

    def updated(self, key: Hashable, change: Callable[[Any], object]) -> None:
        """Note that the current call has changed this without reading it: ``change(old) -> new``.

        For reducers, and for appending.
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

        The order is that of their records in the session. A call that was rolled back changes
        nothing, but its reads are checked as well.

        Args:
            initial: Values before the first call; a missing key starts as None.
            final: Values afterwards, where they are to be compared.
            logged: Keys whose changes survive a rollback, as in LOG slices.
        """
        replay = _Replay(self._calls(session), logged)
        return next(replay.anomalies(initial or {}, final or {}), None)

    def _calls(self, session: Session) -> list[_Attempt]:
        """Return all attempts at outermost calls, in the order of the records."""
        records = {r.call_id: (r, n) for n, r in enumerate(session[ToolInvoked].all())}
        known: dict[_Path, _Attempt] = {}
        outermost: list[_Attempt] = []
        for operation in self._operations:
            siblings: list[Any] = outermost
            for depth in range(1, len(operation.path) + 1):
                path = operation.path[:depth]
                call = known.get(path)
                if call is None:
                    record, order = records.get(path[-1].call.id, (None, len(records)))
                    call = known[path] = _Attempt(path[-1], record, order)
                    siblings.append(call)
                siblings = call.steps
            siblings.append(operation)
        return sorted(outermost, key=_order)


def _path() -> _Path:
    transaction = transaction_under_way.get()
    if transaction is None:
        raise RuntimeError(
            "a history must be used inside a call; in a thread that a handler starts, use "
            "contextvars.copy_context().run"
        )
    return transaction.lineage


class _Replay:
    """Runs the calls one after the other on plain values, and compares their reads."""

    def __init__(self, calls: list[_Attempt], logged: Container[Hashable]) -> None:
        self._calls = calls
        self._logged = logged
        self._versions: dict[Hashable, list[tuple[object, _Attempt | None]]] = {}
        """By key, the values after each outermost call, and which call wrote them."""

    def anomalies(
        self, initial: Mapping[Hashable, object], final: Mapping[Hashable, object]
    ) -> Iterator[Anomaly]:
        values = dict(initial)
        self._versions = {key: [(value, None)] for key, value in initial.items()}
        for call in self._calls:
            if call.is_last and not call.is_interrupted:  # an interrupted call has no answer
                before = dict(values)
                yield from self._replay(call, values, call)
                for key, value in values.items():
                    if value != before.get(key):
                        self._versions.setdefault(key, [(None, None)]).append((value, call))
        for key, value in final.items():
            if values.get(key) != value:
                yield self._wrong_end(key, value, values.get(key))

    def _replay(
        self, call: _Attempt, values: dict[Hashable, object], outermost: _Attempt
    ) -> Iterator[Anomaly]:
        before = dict(values)
        for step in call.in_order():
            if isinstance(step, _Attempt):
                if step.is_last:
                    yield from self._replay(step, values, outermost)
            elif not step.is_read:
                values[step.key] = step.applied_to(values.get(step.key))
            elif values.get(step.key) != step.value:
                name, why, other = self._misread(outermost, step)
                expected = values.get(step.key)
                text = f"{call.name} read {step.key!r} as {step.value!r}, not {expected!r}: {why}"
                calls = (call.id,) if other is None else (call.id, other.id)
                yield Anomaly(name, step.key, step.value, expected, calls, text)
        if not call.is_committed:
            logged = {key: value for key, value in values.items() if key in self._logged}
            values.clear()
            values.update({**before, **logged})

    def _misread(self, reader: _Attempt, read: _Operation) -> tuple[str, str, _Attempt | None]:
        """Return the name of the anomaly, the reason, and the other call involved."""
        versions = self._versions.get(read.key, [(None, None)])
        past = max((n for n, (value, _) in enumerate(versions) if value == read.value), default=-1)
        if past < 0:
            return self._unknown_value(reader, read)
        since = [by for _, by in versions[past + 1 :] if by is not None]
        if not since:
            return "stale read", "the call itself had changed it", None
        changed = f"{since[-1].name} had changed it"
        if reader.is_committed and reader.writes(read.key):
            return "lost update", f"{changed}, and the write replaced that", since[-1]
        for other in since if reader.is_committed else ():
            for change in reader.changes():
                if other.reads(change.key):
                    why = f"it wrote {change.key!r}, while {other.name} read that"
                    return "write skew", f"{why} and wrote {read.key!r}", other
        return "stale read", changed, since[-1]

    def _unknown_value(
        self, reader: _Attempt, read: _Operation
    ) -> tuple[str, str, _Attempt | None]:
        for call in self._calls:
            writes = (op for op in call.operations() if op.key == read.key and not op.is_read)
            if call is not reader and any(
                op.change is None and op.value == read.value for op in writes
            ):
                why = "overwrote it"
                if not call.is_committed:
                    why = "was rolled back"
                elif call.order > reader.order:
                    why = "comes later"
                return "dirty read", f"{call.name} wrote that, and {why}", call
        return "unexplained read", "no call wrote that", None

    def _wrong_end(self, key: Hashable, seen: object, expected: object) -> Anomaly:
        text = f"{key!r} is {seen!r} at the end, not {expected!r}"
        for call in self._calls:
            if call.is_committed and call.writes(key) and self._without(call, key) == seen:
                text += f": the write of {call.name} is missing"
                return Anomaly("lost update", key, seen, expected, (call.id,), text)
        return Anomaly("wrong final state", key, seen, expected, text=text)

    def _without(self, left_out: _Attempt, key: Hashable) -> object:
        """Return the final value of a key without one call."""
        value = self._versions[key][0][0]
        for call in self._calls:
            if call.is_committed and call is not left_out:
                for change in call.changes():
                    if change.key == key:
                        value = change.applied_to(value)
        return value
