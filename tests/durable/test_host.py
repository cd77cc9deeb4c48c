"""A run in a process: opened from the database, merged at its end, continued by anyone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from durable_world import Note, Script, prompt_with

from weakincentives.durable.host import Elsewhere, Hosting, RunHost
from weakincentives.durable.objects import LocalObjects
from weakincentives.durable.performer import Prepared
from weakincentives.durable.steps import Finish, LocalJournal, drive, drive_whole
from weakincentives.errors import LeaseLost
from weakincentives.filesystem import Filesystem, HostFilesystem, branches_of
from weakincentives.filesystem.portable import store_tree
from weakincentives.runtime import SavedSession, Session
from weakincentives.runtime.conversation import Message
from weakincentives.runtime.stores.database import Database
from weakincentives.runtime.stores.runs import DurableRun, Runs
from weakincentives.runtime.stores.sql import SqlStore
from weakincentives.runtime.tool_call import step_by_hand
from weakincentives.session.events import ToolInvoked

TURNS: list[list[tuple[str, dict[str, Any]]]] = [
    [("append", {"text": "one"}), ("note", {"text": "a"})],
    [("append", {"text": "two"})],
    [("fail", {"text": "x"}), ("append", {"text": "three"})],
]


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.project = folder / "project"
        self.project.mkdir()
        self.database = Database(f"sqlite:///{folder / 'wink.db'}")
        self.runs = Runs(self.database)
        self.store = SqlStore(self.database, lease=5.0)
        self.objects = LocalObjects(folder / "objects")
        self.turns: Sequence[Any] = TURNS
        self.asks: Sequence[str] = ()
        self.stopping = False

    def submit(self, **about: Any) -> DurableRun:
        given = {"workspace": str(self.project), **about}
        return self.runs.submit("Append lines.", about=given)

    def host(self, run: DurableRun, name: str = "here", **given: Any) -> RunHost:
        hosting = Hosting(
            runs=self.runs,
            store=self.store,
            objects=self.objects,
            prepare=self.prepare,
            cache=self.folder / f"cache-{name}",
            worker=name,
            is_stopping=lambda: self.stopping,
            **given,
        )
        return RunHost(run.id, self.runs.find(run.id).sitting, hosting)

    @contextmanager
    def prepare(
        self, run: DurableRun, files: HostFilesystem, session: Session
    ) -> Iterator[Prepared]:
        prompt = prompt_with(self.asks, resources={Filesystem: files})
        yield Prepared(adapter=Script(self.turns), prompt=prompt)

    def drive(self, run: DurableRun, **given: Any) -> str:
        host = self.host(run, **given)
        try:
            return step_by_hand(drive, run.id, LocalJournal(host))
        finally:
            host.close()

    def session(self, run: DurableRun) -> Session:
        with SavedSession.open(run.id, store=self.store) as saved:
            return saved.session

    @property
    def lines(self) -> list[str]:
        path = self.project / "lines.txt"
        return path.read_text().split() if path.exists() else []


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.database.close()


def test_a_run_works_on_a_branch_and_is_merged_at_its_end(world: World):
    run = world.submit()
    seen: list[list[str]] = []
    host = world.host(run)

    class Watched(LocalJournal):
        async def step(self, step: Any) -> Any:
            seen.append(world.lines)
            return await super().step(step)

    assert step_by_hand(drive, run.id, Watched(host)) == "done"

    assert all(lines == [] for lines in seen)
    assert world.lines == ["one", "two", "three"]
    assert world.runs.find(run.id).status == "done"
    assert world.runs.find(run.id).detail == "Done."
    assert branches_of(world.project) == ()


def test_a_run_that_leaves_its_changes_is_not_merged(world: World):
    run = world.submit(no_merge=True)

    assert world.drive(run) == "done"
    assert world.lines == []


def test_a_run_that_moves_from_process_to_process_at_every_step_is_exact(world: World):
    """What a process left on disk is not used: each begins with what the database has."""
    run, number, ended = world.submit(), 0, None
    for at in range(30):
        host = world.host(run, wait=0.0)

        class Moves(LocalJournal):
            async def step(self, step: Any, at: int = at) -> Any:
                if len(self.steps) > at:
                    raise Elsewhere("moved")
                return await super().step(step)

        try:
            ended = step_by_hand(drive, run.id, Moves(host))
            break
        except Elsewhere:
            number += 1
        finally:
            host.close()

    assert ended == "done"
    assert number > 3
    assert world.lines == ["one", "two", "three"]
    assert world.session(run)[Note].all() == (Note("a"),)


def test_the_whole_run_as_one_step(world: World):
    run = world.submit()

    assert step_by_hand(drive_whole, run.id, LocalJournal(world.host(run))) == "done"
    assert world.lines == ["one", "two", "three"]


def test_a_stored_tree_is_worked_on_anywhere(world: World, tmp_path: Path):
    (world.project / "lines.txt").write_text("zero\n")
    base = store_tree(world.project, world.objects).encode()
    run = world.submit(base=base)
    first = world.host(run, "there")

    class Some(LocalJournal):
        async def step(self, step: Any) -> Any:
            if len(self.steps) == 3:
                raise Elsewhere("moved")
            return await super().step(step)

    with pytest.raises(Elsewhere):
        step_by_hand(drive, run.id, Some(first))
    first.close()
    host = world.host(run, "elsewhere")

    assert step_by_hand(drive, run.id, LocalJournal(host)) == "done"

    assert world.lines == ["zero"], "the directory that it was stored from stays as it is"
    found = [each for each in (tmp_path / "cache-elsewhere").iterdir() if len(each.name) == 32]
    (branch,) = branches_of(found[0])
    assert branch.paths == ("lines.txt",)


def test_conflicting_changes_are_the_models_to_deal_with(world: World):
    lines = world.project / "lines.txt"
    lines.write_text("zero\n")
    run = world.submit()
    host = world.host(run)

    class Meanwhile(LocalJournal):
        async def step(self, step: Any) -> Any:
            if type(step).__name__ == "Finish" and lines.read_text() == "zero\n":
                lines.write_text("other\n")
            return await super().step(step)

    world.turns = [[("append", {"text": "one"})]]

    assert step_by_hand(drive, run.id, Meanwhile(host)) == "done"

    texts = [each.text for each in world.session(run)[Message].all() if each.role == "user"]
    assert "Your changes are not in the workspace yet" in texts[-1]
    assert lines.read_text() == "other\n", "the model did not make its change again"


def test_a_conflict_survives_a_move(world: World):
    lines = world.project / "lines.txt"
    lines.write_text("zero\n")
    world.turns = [[("append", {"text": "one"})]]
    run = world.submit()
    host = world.host(run)

    class Cut(LocalJournal):
        async def step(self, step: Any) -> Any:
            if type(step).__name__ == "Finish":
                lines.write_text("other\n")
                await super().step(step)
                raise Elsewhere("moved")
            return await super().step(step)

    with pytest.raises(Elsewhere):
        step_by_hand(drive, run.id, Cut(host))
    host.close()

    assert world.drive(run) == "done"
    assert lines.read_text() == "other\n"


def test_a_call_that_needs_a_person_frees_the_session(world: World):
    world.asks = ["append"]
    world.turns = TURNS[:2]
    run = world.submit()

    assert world.drive(run) == "waiting"
    assert world.runs.find(run.id).status == "waiting"
    assert not world.store.is_in_use(run.id)
    (asked,) = world.runs.pending(run.id)
    assert world.runs.answer(asked.id, approved=True, digest=asked.digest).sitting == 2
    assert world.drive(run) == "waiting"
    (asked,) = world.runs.pending(run.id)
    world.runs.answer(asked.id, approved=True, digest=asked.digest, arguments={"text": "edited"})
    assert world.drive(run) == "done"
    assert world.lines == ["one", "edited"]


def test_a_cancelled_run_stops_and_is_not_merged(world: World):
    run = world.submit()
    host = world.host(run)

    class Cancelled(LocalJournal):
        async def step(self, step: Any) -> Any:
            if len(self.steps) == 3:
                world.runs.cancel(run.id)
            return await super().step(step)

    assert step_by_hand(drive, run.id, Cancelled(host)) == "cancelled"
    assert world.lines == []
    assert world.runs.find(run.id).status == "cancelled"


def test_a_paused_process_that_lost_its_lease_changes_nothing(world: World):
    world.store = SqlStore(world.database, lease=0.2)
    run = world.submit()
    paused = world.host(run, "paused")

    class Pauses(LocalJournal):
        async def step(self, step: Any) -> Any:
            if len(self.steps) == 2:
                with world.database.transaction() as transaction:  # as if it was paused so long
                    transaction.execute("UPDATE wink_sessions SET expires = 0")
                assert world.drive(run, name="other") == "done"
            return await super().step(step)

    with pytest.raises(Elsewhere):
        step_by_hand(drive, run.id, Pauses(paused))

    assert world.lines == ["one", "two", "three"]
    found = world.runs.find(run.id)
    assert (found.status, found.worker) == ("done", "other")


def test_a_worker_that_stops_leaves_the_run_to_others(world: World):
    run = world.submit()
    host = world.host(run)

    class Stops(LocalJournal):
        async def step(self, step: Any) -> Any:
            world.stopping = len(self.steps) == 2
            return await super().step(step)

    with pytest.raises(Elsewhere):
        step_by_hand(drive, run.id, Stops(host))
    world.stopping = False
    assert not world.store.is_in_use(run.id)
    assert world.drive(run, wait=0.0) == "done"
    assert world.lines == ["one", "two", "three"]


def test_a_run_is_merged_later_if_somebody_has_the_directory_to_themselves(world: World):
    run = world.submit()
    host = world.host(run, wait=0.1)

    class Meets(LocalJournal):
        async def step(self, step: Any) -> Any:
            if not isinstance(step, Finish):
                return await super().step(step)
            with HostFilesystem(world.project):
                return await super().step(step)

    with pytest.raises(Elsewhere):
        step_by_hand(drive, run.id, Meets(host))
    assert (world.lines, world.runs.find(run.id).status) == ([], "running")
    assert world.drive(run, wait=0.1) == "done"
    assert world.lines == ["one", "two", "three"]


def test_a_run_that_cannot_be_opened_fails_in_words(world: World):
    run = world.runs.submit("Nowhere.", about={})

    assert world.drive(run) == "failed"
    assert "names no directory" in world.runs.find(run.id).detail


def test_a_run_that_has_ended_is_not_performed_again(world: World):
    run = world.submit()
    world.drive(run)

    assert world.drive(run) == "done"
    assert world.lines == ["one", "two", "three"]
    assert json.loads(json.dumps(world.runs.find(run.id).detail)) == "Done."


class _Dies(Exception):
    """Stands for a kill: nothing after it happens."""


def _driven_until_the_merge(world: World, run: DurableRun, host: RunHost) -> None:
    """Drive a run up to its last step, which merges."""

    class UntilFinish(LocalJournal):
        async def step(self, step: Any) -> Any:
            if isinstance(step, Finish):
                raise _Dies
            return await super().step(step)

    with pytest.raises(_Dies):
        step_by_hand(drive, run.id, UntilFinish(host))


def test_a_kill_between_the_merge_and_its_record_merges_nothing_twice(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    run = world.submit()
    host = world.host(run)
    _driven_until_the_merge(world, run, host)

    def dies(saved: SavedSession) -> None:
        raise LeaseLost("as after a kill")

    with monkeypatch.context() as patched, pytest.raises(Elsewhere):
        patched.setattr(SavedSession, "save", dies)
        host.perform(Finish(run.id, "done"))
    assert world.lines == ["one", "two", "three"], "it is merged, and nobody knows"

    assert world.drive(run, name="there") == "done"
    assert world.lines == ["one", "two", "three"]
    merges = [e for e in world.session(run)[ToolInvoked].all() if e.tool_name == "merge"]
    assert all(each.success for each in merges)
    models = [m for m in world.session(run)[Message].all() if m.role == "model"]
    assert len(models) == len(TURNS) + 1, "the model was not told of a conflict"


def test_a_process_that_was_paused_before_its_merge_merges_nothing(world: World):
    run = world.submit()
    paused = world.host(run)
    _driven_until_the_merge(world, run, paused)
    with world.database.transaction() as transaction:
        transaction.execute("UPDATE wink_sessions SET expires = 0")

    assert world.drive(run, name="there", wait=5.0) == "done"
    (world.project / "lines.txt").unlink()  # what somebody does later stays so
    with pytest.raises(Elsewhere):
        paused.perform(Finish(run.id, "done"))
    assert world.lines == []
