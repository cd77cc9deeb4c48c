"""Search in the texts, arguments and results of a run, and in the contents of its files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.debugger.contents import World, text_of, wire_path
from weakincentives.debugger.records import Json, RunCalls
from weakincentives.debugger.views import Views
from weakincentives.runtime.calls import plain_result
from weakincentives.serde.exact import plain

T = TypeVar("T")

_KINDS = ("text", "arguments", "results", "files")
_MOST = 200
"""Hits."""
_SECONDS = 3.0
_AROUND = 60
"""Characters shown on each side of a match."""


def search(views: Views, run_id: str, text: str, kinds: Sequence[str] = ()) -> Json:
    """Return where a text occurs, newest first within each kind; case does not matter.

    It stops after some seconds, or many hits; then ``truncated`` is true.

    Raises:
        ValueError: There is no such kind.
    """
    for kind in kinds:
        if kind not in _KINDS:
            raise ValueError(f"in= takes {', '.join(_KINDS)}, got {kind!r}")
    found = _Search(views, views.joined(run_id), text)
    ways = {"text": found.texts, "files": found.files}
    hits: list[Json] = []
    for kind in _KINDS:
        if not kinds or kind in kinds:
            hits += islice(ways.get(kind, found.calls)(kind), _MOST - len(hits) + 1)
    return {"hits": hits[:_MOST], "truncated": len(hits) > _MOST or found.is_late}


class _Search:
    def __init__(self, views: Views, joined: RunCalls, text: str) -> None:
        self._views = views
        self._joined = joined
        self._pattern = re.compile(re.escape(text), re.IGNORECASE)
        self._end = SYSTEM_CLOCK.monotonic() + _SECONDS
        self.is_late = False

    def texts(self, kind: str) -> Iterator[Json]:
        """Yield hits in what the model and the user wrote."""
        records = self._joined.records
        turns = list(reversed(records.turns))
        fields = records.all_fields([turn.item for turn in turns])
        for turn, message in self._in_time(zip(turns, fields, strict=True)):
            call = next(iter(turn.calls), None)
            for each in (str(plain(message.get("text", ""))), turn.user):
                yield from self._hits(each, call=call, where="text")

    def calls(self, kind: str) -> Iterator[Json]:
        """Yield hits in arguments, or in results as the model saw them."""
        records = self._joined.records
        calls = [each.call for each in reversed(self._joined.placed)]
        items = [records.notes[call.number - 1].item for call in calls]
        for call, record in self._in_time(zip(calls, records.all_fields(items), strict=True)):
            if kind == "arguments":
                text, where = json.dumps(plain(record.get("params")), ensure_ascii=False), kind
            else:
                text, where = plain_result(record.get("result")), "result"
            yield from self._hits(text, call=call.number, where=where)

    def files(self, kind: str) -> Iterator[Json]:
        """Yield hits in the files after the last call, and in versions that calls wrote before."""
        joined, views = self._joined, self._views
        last = World(joined.versions, joined.top)
        for parts in self._in_time(sorted(views.contents.paths_at(last))):
            text, _ = text_of(*views.contents.at(last, parts))
            yield from self._hits(
                text or "", serial=joined.top, where="file", path=wire_path(parts)
            )
        for commit in self._in_time(reversed(joined.versions.since(joined.base))):
            serial = commit.call.serial
            for step in commit.steps if serial <= joined.top else ():
                content = views.contents.at(World(joined.versions, serial), step.parts)
                now = views.contents.at(last, step.parts)[0]
                if now is not None and step.after is not None and now.digest == step.after.digest:
                    continue  # found already
                text, _ = text_of(*content)
                call = joined.commits.get(serial)
                path = wire_path(step.parts)
                yield from self._hits(text or "", call=call, serial=serial, where="file", path=path)

    def _hits(
        self,
        text: str,
        *,
        where: str,
        call: int | None = None,
        serial: int | None = None,
        path: str = "",
    ) -> Iterator[Json]:
        """Yield the first match in a text."""
        found = self._pattern.search(text)
        if found is None:
            return
        start = max(text.rfind("\n", 0, found.start()) + 1, found.start() - _AROUND)
        end = text.find("\n", found.end())
        end = min(len(text) if end < 0 else end, found.end() + _AROUND)
        yield {
            "call": call,
            "serial": serial,
            "where": where,
            "path": path,
            "excerpt": text[start:end],
            "at": found.start() - start,
        }

    def _in_time(self, items: Iterable[T]) -> Iterator[T]:
        for item in items:
            if SYSTEM_CLOCK.monotonic() > self._end:
                self.is_late = True
                return
            yield item
