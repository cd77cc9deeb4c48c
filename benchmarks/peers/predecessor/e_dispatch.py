"""Dispatch an event on a session whose slices have grown."""

from dataclasses import dataclass

from common import VERSION, Session, compare, emit

from weakincentives.runtime import replace_latest, upsert_by


@dataclass(slots=True, frozen=True)
class Event:
    key: int


def dispatching(reducer, earlier):
    session = Session()
    if reducer is not None:
        session[Event].register(Event, reducer)
    if earlier and reducer is not replace_latest:
        session[Event].seed(tuple(Event(key) for key in range(earlier)))
    return lambda: session.dispatch(Event(5))


for earlier in (0, 1_000, 10_000, 100_000):
    for name, reducer in (
        ("append_all", None),
        ("replace_latest", replace_latest),
        ("upsert_by", upsert_by(lambda event: event.key)),
    ):
        samples = compare(
            {name: dispatching(reducer, earlier)}, times=10 if earlier < 10_000 else 2, batches=20
        )
        emit(f"dispatch {name}", version=VERSION, earlier=earlier, dispatch=samples[name].figures())
