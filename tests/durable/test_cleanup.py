"""What is removed with a run, and what its neighbours still need."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from test_host import World

from weakincentives.durable.cleanup import needed_objects, remove_runs
from weakincentives.durable.objects import collect
from weakincentives.filesystem.portable import store_tree


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_removed_runs_leave_nothing_and_others_keep_everything(world: World):
    world.project.joinpath("a.txt").write_text("a")
    base = store_tree(world.project, world.objects)
    old = world.submit(base=base.encode())
    assert world.drive(old) == "done"
    kept = world.submit(base=base.encode())
    world.runs.begin(kept.id, 1, "here")

    assert remove_runs(world.runs, older_than=-1) == [old.id]
    assert [run.id for run in world.runs.list()] == [kept.id]
    assert world.store.names() == []

    before = {key for key, _ in world.objects.ages()}
    needed = needed_objects(world.runs, world.objects)
    assert needed < before  # the changes of the removed run
    collect(world.objects, needed, older_than=-1)
    assert {key for key, _ in world.objects.ages()} == needed
    assert world.drive(kept) == "done"
    assert needed_objects(world.runs, world.objects) == {key for key, _ in world.objects.ages()}


def test_runs_that_ended_recently_or_are_open_stay(world: World):
    run = world.submit()
    assert world.drive(run) == "done"
    waiting = world.submit()

    assert remove_runs(world.runs) == []
    with closing(world.store.open(run.id)):
        assert remove_runs(world.runs, older_than=-1) == []
    assert remove_runs(world.runs, older_than=-1) == [run.id]
    assert world.runs.find(waiting.id).status == "queued"
