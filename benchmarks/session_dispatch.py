"""Dispatch an event on a session whose slices have grown, for each of the shipped reducers."""

from collections.abc import Callable
from dataclasses import dataclass

from timing import compare, emit, is_quick
from weakincentives.runtime import Session, append_all, replace_latest, upsert_by


@dataclass(frozen=True, slots=True)
class Event:
    key: int


def dispatching(reducer: Callable[..., object], earlier: int) -> Callable[[], object]:
    session = Session()
    session[Event].register(Event, reducer)
    for key in range(earlier if reducer is append_all else min(earlier, 1)):
        session.dispatch(Event(key))
    if reducer not in (append_all, replace_latest):
        # Filled at once: as many keys as there are events, the worst case.
        session[Event].seed(tuple(Event(key) for key in range(earlier)))
    return lambda: session.dispatch(Event(5))


if __name__ == "__main__":
    quick = is_quick()
    for earlier in (0, 1_000, 10_000) if quick else (0, 1_000, 10_000, 100_000):
        for name, reducer, times in (
            ("append_all", append_all, 20),
            ("replace_latest", replace_latest, 20),
            ("upsert_by", upsert_by(lambda event: event.key), 20 if earlier < 10_000 else 2),
        ):
            samples = compare(
                {name: dispatching(reducer, earlier)},
                times=times,
                batches=20 if quick else 100,
            )
            emit(f"dispatch {name}", earlier=earlier, dispatch=samples[name].figures())
