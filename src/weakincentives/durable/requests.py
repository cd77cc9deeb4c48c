"""Requests of a ``MainLoop`` in the queue of runs: any number of processes serve them.

>>> run = submit_request(runs, Question("Why?"))  # doctest: +SKIP
>>> serve(loop, engine, runs, objects=objects, cache=cache)  # doctest: +SKIP
>>> output_of(runs.find(run.id), Answer)  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from weakincentives.adapters.base import Adapter
from weakincentives.core.call import RunContext
from weakincentives.durable.dbos import DbosEngine, Worker
from weakincentives.durable.host import EMPTY, Opening
from weakincentives.durable.performer import Prepared
from weakincentives.errors import WinkError
from weakincentives.prompt.structured_output import parse_structured_output
from weakincentives.runtime.stores.runs import DurableRun, Runs
from weakincentives.serde import freeze, thaw

if TYPE_CHECKING:
    from weakincentives.filesystem import HostFilesystem
    from weakincentives.filesystem.portable import ObjectStorage
    from weakincentives.runtime.main_loop import MainLoop
    from weakincentives.session.session import Session

T = TypeVar("T")

_REQUEST = "request"


def submit_request(runs: Runs, request: Any, *, key: str = "") -> DurableRun:
    """Queue a request, which is a dataclass; with a key, only once."""
    about = {"kind": _REQUEST, _REQUEST: freeze(request), "base": {"kind": EMPTY}}
    return runs.submit(type(request).__name__, about=about, key=key)


def output_of(run: DurableRun, output_type: type[T]) -> T:
    """Return the output of a request that was served.

    Raises:
        WinkError: It has not ended, or it failed.
    """
    if run.status != "done":
        raise WinkError(f"request {run.id} is {run.status}: {run.detail}".removesuffix(": "))
    return parse_structured_output(run.detail, output_type)


def serving(
    loop: MainLoop[Any, Any],
    engine: DbosEngine,
    runs: Runs,
    *,
    objects: ObjectStorage,
    cache: Path,
    **options: Any,
) -> Worker:
    """Return a worker that serves the requests of a loop; options are those of ``Worker``.

    ``loop.prepare`` returns the prompt and the session of a request. It is called each time that
    a process opens the request: the session then gets what was saved.
    """
    if not isinstance(loop.adapter, Adapter):
        raise WinkError("the adapter of a loop that is served must be an Adapter")
    adapter = loop.adapter

    def opening(run: DurableRun) -> Opening:
        return Opening(session=lambda: loop.prepare(_request_of(run))[1])

    @contextmanager
    def prepare(run: DurableRun, files: HostFilesystem, session: Session) -> Generator[Prepared]:
        prompt, _ = loop.prepare(_request_of(run))
        if loop.config.resources is not None:
            prompt = prompt.bind(resources=loop.config.resources)
        stop = session.dispatcher.subscribe(object, loop.bus.publish)
        ids = RunContext(run_id=run.id, loop_id=loop.loop_id)
        try:
            yield Prepared(
                adapter=adapter,
                prompt=prompt,
                options={"config": loop.config, "run_context": ids},
                message="",
            )
        finally:
            stop()

    return Worker(engine, runs, prepare, objects=objects, cache=cache, opening=opening, **options)


def serve(
    loop: MainLoop[Any, Any],
    engine: DbosEngine,
    runs: Runs,
    *,
    objects: ObjectStorage,
    cache: Path,
    **options: Any,
) -> None:
    """Serve requests until SIGTERM; other processes continue what is in progress."""
    serving(loop, engine, runs, objects=objects, cache=cache, **options).run()


def _request_of(run: DurableRun) -> Any:
    if run.about.get("kind") != _REQUEST:
        raise WinkError(f"run {run.id} is not a request to a loop: {run.task!r}")
    return thaw(run.about[_REQUEST])
