"""A worker in a process of its own, for tests that kill it: URL FOLDER NAME [CONCURRENCY [LEASE]]

Runs say in ``about`` what their model does: ``turns`` (a list of lists of calls), ``delay``
(seconds per turn), ``gate`` (a file that its third turn waits for), ``asks`` (tools that need a
person).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from durable_world import Note, Script, prompt_with

from weakincentives.durable.dbos import DbosEngine, Worker
from weakincentives.durable.host import Opening
from weakincentives.durable.objects import LocalObjects
from weakincentives.durable.performer import Prepared
from weakincentives.filesystem import Filesystem, HostFilesystem
from weakincentives.runtime import Session
from weakincentives.runtime.stores.database import Database
from weakincentives.runtime.stores.runs import DurableRun, Runs


@contextmanager
def prepare(run: DurableRun, files: HostFilesystem, session: Session) -> Iterator[Prepared]:
    prompt = prompt_with(run.about.get("asks", ()), resources={Filesystem: files})
    about = run.about
    script = Script(about["turns"], about.get("delay", 0.0), about.get("gate", ""))
    yield Prepared(adapter=script, prompt=prompt)


def make_worker(
    url: str, folder: Path, name: str, concurrency: int = 4, lease: float = 5.0
) -> Worker:
    return Worker(
        DbosEngine(url, poll=0.1),
        Runs(Database(url)),
        prepare,
        objects=LocalObjects(folder / "objects"),
        cache=folder / f"cache-{name}",
        name=name,
        machine="here",
        concurrency=concurrency,
        lease=lease,
        opening=lambda run: Opening(types=[Note]),
    )


if __name__ == "__main__":
    url, folder, name, *more = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} %(name)s %(message)s")
    concurrency = int(more[0]) if more else 4
    lease = float(more[1]) if len(more) > 1 else 5.0
    make_worker(url, Path(folder), name, concurrency, lease).run()
