from __future__ import annotations

from typing import Any

import pytest
from small_world import AddStep, Counter, Noted, Plan, Step, World, changing_everything

import weakincentives as wink
from weakincentives.errors import SnapshotExpired
from weakincentives.filesystem import Filesystem, MemoryFilesystem
from weakincentives.prompt import Tool, ToolContext, ToolResult
from weakincentives.resources import Binding, ResourceRegistry
from weakincentives.retry import RetryPolicy
from weakincentives.runtime import (
    PendingToolTracker,
    Session,
    ToolRegistry,
    create_snapshot,
    restore_snapshot,
    tool_transaction,
)
from weakincentives.testing import make_context

UNTOUCHED = (Plan(), {}, 0)


def work(world: World, name: str = "a") -> None:
    context = ToolContext(session=world.session, resources=world.prompt.resources)
    changing_everything(Step(name), context)


def test_a_block_that_ends_well_keeps_its_changes():
    world = World([])

    with tool_transaction(world.session, world.prompt.resources, tag="my_operation") as snapshot:
        work(world)

    assert snapshot.tag == "my_operation"
    assert world.state()[0] == Plan(("a",))


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit()])
def test_a_block_that_raises_is_undone_and_raises_on(error: BaseException):
    world = World([])

    with pytest.raises(type(error)), tool_transaction(world.session, world.prompt.resources):
        work(world)
        raise error

    assert world.state() == UNTOUCHED
    assert world.session[Noted].all() == (Noted("a"),)


def test_a_block_can_be_undone_by_hand_and_go_on():
    world = World([])

    with tool_transaction(world.session, world.prompt.resources) as snapshot:
        work(world, "a")
        restore_snapshot(world.session, world.prompt.resources, snapshot)
        work(world, "b")

    assert world.state()[0] == Plan(("b",))


def test_blocks_nest_as_savepoints():
    world = World([])

    with tool_transaction(world.session, world.prompt.resources):
        work(world, "a")
        with pytest.raises(ValueError, match="inner"):  # noqa: SIM117
            with tool_transaction(world.session, world.prompt.resources):
                work(world, "b")
                raise ValueError("inner")
        work(world, "c")

    plan, files, count = world.state()
    assert plan == Plan(("a", "c"))
    assert set(files) == {"a.txt", "c.txt", "journal.txt"}
    assert count == 2


def test_restoring_an_older_snapshot_makes_newer_ones_unusable():
    world = World([])
    older = create_snapshot(world.session, world.prompt.resources, tag="older")
    work(world)
    newer = create_snapshot(world.session, world.prompt.resources, tag="newer")

    restore_snapshot(world.session, world.prompt.resources, older)

    with pytest.raises(SnapshotExpired, match="newer"):
        restore_snapshot(world.session, world.prompt.resources, newer)
    assert world.state() == UNTOUCHED


def test_a_snapshot_can_be_restored_again_and_again():
    world = World([])
    snapshot = create_snapshot(world.session, world.prompt.resources)

    for name in ("a", "b"):
        work(world, name)
        restore_snapshot(world.session, world.prompt.resources, snapshot)
        assert world.state() == UNTOUCHED


def test_a_resource_first_built_after_the_snapshot_goes_back_to_how_it_began():
    registry = ResourceRegistry.of(Binding(Counter, lambda r: Counter(value=10)))
    session = Session()
    with registry.open() as resources:
        snapshot = create_snapshot(session, resources)
        resources.get(Counter).value = 99

        restore_snapshot(session, resources, snapshot)

        assert resources.get(Counter).value == 10


@pytest.mark.parametrize("form", ["registry", "mapping", "context", "prompt"])
def test_resources_come_in_any_form(form: str):
    world = World([])
    fs = world.fs
    registry = ResourceRegistry.build({Filesystem: fs})
    resources = {
        "registry": registry,
        "mapping": {Filesystem: fs},
        "context": registry.open(),
        "prompt": world.prompt.resources,
    }[form]

    with pytest.raises(ValueError, match="x"), tool_transaction(world.session, resources):
        fs.write("a.txt", "x")
        raise ValueError("x")

    assert not fs.exists("a.txt")


def test_inside_a_handler_a_transaction_covers_the_calls_views():
    from small_world import make_tool

    def body(params: Step, context: ToolContext) -> None:
        with pytest.raises(ValueError, match="inner"):  # noqa: SIM117
            with tool_transaction(context.session, context.resources):
                changing_everything(Step("inner"), context)
                raise ValueError("inner")

    world = World([make_tool("work", body)])

    assert world.call("work").success
    plan, files, count = world.state()
    assert plan == Plan(("a",))
    assert files == {"a.txt": "written", "journal.txt": "a\n"}
    assert count == 1


# Tools that run elsewhere


def test_a_native_tool_that_fails_is_rolled_back():
    world = World([])
    tracker = PendingToolTracker(session=world.session, resources=world.prompt.resources)

    tracker.begin_tool_execution(tool_use_id="abc", tool_name="write_file")
    assert tracker.pending == ("abc",)
    work(world)
    rolled_back = tracker.end_tool_execution(tool_use_id="abc", success=False)

    assert rolled_back
    assert tracker.pending == ()
    assert world.state() == UNTOUCHED


def test_a_native_tool_that_succeeds_is_kept():
    world = World([])
    tracker = PendingToolTracker(session=world.session, resources=world.prompt.resources)

    tracker.begin_tool_execution(tool_use_id="abc", tool_name="write_file")
    work(world)

    assert not tracker.end_tool_execution(tool_use_id="abc", success=True)
    assert world.state()[0] == Plan(("a",))


def test_an_end_that_comes_twice_or_for_an_unknown_tool_does_nothing():
    world = World([])
    tracker = PendingToolTracker(session=world.session, resources=world.prompt.resources)
    tracker.begin_tool_execution(tool_use_id="abc", tool_name="write_file")
    tracker.end_tool_execution(tool_use_id="abc", success=True)
    work(world)

    assert not tracker.end_tool_execution(tool_use_id="abc", success=False)
    assert not tracker.end_tool_execution(tool_use_id="never", success=False)
    assert world.state()[0] == Plan(("a",))


def test_a_tool_use_cannot_begin_twice():
    tracker = PendingToolTracker(session=Session())
    tracker.begin_tool_execution(tool_use_id="abc", tool_name="x")

    with pytest.raises(ValueError, match="abc"):
        tracker.begin_tool_execution(tool_use_id="abc", tool_name="x")


def test_all_pending_tools_can_be_rolled_back_at_once():
    world = World([])
    tracker = PendingToolTracker(session=world.session, resources=world.prompt.resources)
    for name in ("a", "b"):
        tracker.begin_tool_execution(tool_use_id=name, tool_name="write_file")
        work(world, name)

    assert tracker.abort_all() == ("b", "a")
    assert world.state() == UNTOUCHED


@pytest.mark.parametrize("success", [True, False])
def test_rolling_back_the_older_of_two_takes_the_newer_with_it_and_says_so(success: bool):
    world = World([])
    tracker = PendingToolTracker(session=world.session, resources=world.prompt.resources)
    for name in ("a", "b"):
        tracker.begin_tool_execution(tool_use_id=name, tool_name="write_file")
        work(world, name)

    tracker.end_tool_execution(tool_use_id="a", success=False)
    rolled_back = tracker.end_tool_execution(tool_use_id="b", success=success)

    assert rolled_back
    assert world.state() == UNTOUCHED


def test_a_context_of_the_testing_module_takes_part():
    context = make_context(fs=MemoryFilesystem({"keep.txt": "x"}))

    with (
        pytest.raises(ValueError, match="x"),
        tool_transaction(context.session, context.resources),
    ):
        context.filesystem.delete("keep.txt")
        context.session.dispatch(AddStep("x"))
        raise ValueError("x")

    assert context.filesystem.read("keep.txt") == "x"
    assert context.session[AddStep].all() == ()


class Basket:
    """A resource that knows nothing of the runtime, and gives each call a view of its own."""

    def __init__(self, items: tuple[str, ...] = ()) -> None:
        self.items = items

    def snapshot(self) -> tuple[str, ...]:
        return self.items

    def restore(self, token: tuple[str, ...]) -> None:
        self.items = token

    def fork(self) -> Basket:
        return Basket(self.items)

    def merge(self, view: Basket) -> None:
        self.items = view.items


def test_a_resource_of_a_user_that_can_fork_is_forked_merged_and_forgotten():
    basket, seen = Basket(), []

    @wink.tool(reach="reversible")
    def put(item: str, fail: bool = False, *, context: wink.ToolContext) -> str:
        """Put something into the basket."""
        mine = context.resources.get(Basket)
        mine.items = (*mine.items, item)
        seen.append(basket.items)
        assert context.resources.get(Basket) is mine
        if item == "outer":
            put(item="inner", context=context)
            put(item="lost", fail=True, context=context)
        if fail:
            raise ValueError("no")
        return item

    context = wink.ToolContext(session=wink.Session(), resources={Basket: basket})
    put(item="outer", context=context)
    assert basket.items == ("outer", "inner")
    assert seen == [(), (), ()], "only views change until the commit"

    result = put(item="more", fail=True, context=context)

    assert basket.items == ("outer", "inner")
    assert "Basket" in result.metadata.undone


class Ledgerlike:
    """A resource with views that notes how each of them ended."""

    def __init__(self, ended: list[str], name: str = "base") -> None:
        self.ended, self.name, self.value = ended, name, 0

    def snapshot(self) -> int:
        return self.value

    def restore(self, token: int) -> None:
        self.value = token

    def fork(self) -> Ledgerlike:
        view = Ledgerlike(self.ended, f"view of {self.name}")
        view.value = self.value
        return view

    def merge(self, view: Ledgerlike) -> None:
        self.ended.append(f"{view.name} merged")
        self.value = view.value

    def discard(self, view: Ledgerlike) -> None:
        self.ended.append(f"{view.name} discarded")


class Stubborn(Ledgerlike):
    """One that can't be merged."""

    def merge(self, view: Ledgerlike) -> None:
        raise RuntimeError("not now")


class TestViews:
    """`merge` or `discard` is called exactly once for each fork."""

    def test_a_call_that_succeeds_merges_its_view_once(self):
        ended: list[str] = []
        tools = ToolRegistry([_using(Ledgerlike)], resources={Ledgerlike: Ledgerlike(ended)})
        assert tools.execute("use", {"name": "a"}).success
        assert ended == ["view of base merged"]

    @pytest.mark.parametrize("how", ["answers", "raises", "is retried", "is interrupted"])
    def test_a_call_that_fails_discards_its_view_once(self, how: str):
        ended: list[str] = []
        retry = RetryPolicy(max_retries=1) if how == "is retried" else None
        tools = ToolRegistry(
            [_using(Ledgerlike, how, retry=retry)], resources={Ledgerlike: Ledgerlike(ended)}
        )
        if how == "is interrupted":
            with pytest.raises(KeyboardInterrupt):
                tools.execute("use", {"name": "a"})
        else:
            assert not tools.execute("use", {"name": "a"}).success
        assert ended == ["view of base discarded"] * (2 if retry else 1)

    def test_a_nested_call_and_the_call_around_it_end_their_own_views(self):
        ended: list[str] = []
        inner = _using(Ledgerlike)

        def handler(params: Step, *, context: ToolContext) -> ToolResult[None]:
            inner(Step("a"), context=context)
            return ToolResult.error("no")

        outer = Tool[Step, None](name="outer", description="Uses.", handler=handler)
        tools = ToolRegistry([outer], resources={Ledgerlike: Ledgerlike(ended)})
        assert not tools.execute("outer", {"name": "a"}).success
        assert ended == ["view of view of base merged", "view of base discarded"]

    def test_a_commit_that_fails_halfway_discards_only_what_was_not_merged(self):
        """What was merged is restored; it is not discarded as well."""
        ended: list[str] = []
        one, other = Ledgerlike(ended, "one"), Stubborn(ended, "other")
        tools = ToolRegistry(
            [_using(Ledgerlike, "", Stubborn)], resources={Ledgerlike: one, Stubborn: other}
        )
        assert not tools.execute("use", {"name": "a"}).success
        assert ended == ["view of one merged", "view of other discarded"]
        assert (one.value, other.value) == (0, 0)


def _using(*kinds: Any, retry: Any = None) -> Tool[Step, None]:
    """Return a tool that changes resources, then ends in some way."""
    how = next((each for each in kinds if isinstance(each, str)), "")

    def handler(params: Step, *, context: ToolContext) -> ToolResult[None]:
        for kind in kinds:
            if isinstance(kind, type):
                context.resources.get(kind).value += 1
        if how == "raises":
            raise ValueError("no")
        if how == "is interrupted":
            raise KeyboardInterrupt
        return ToolResult.error("no") if how else ToolResult.ok(None)

    return Tool[Step, None](
        name="use", description="Uses.", handler=handler, retry=retry, reach="reversible"
    )
