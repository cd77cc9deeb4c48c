from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_world import (
    AddStep,
    Plan,
    Step,
    World,
    add_step,
    changing_everything,
    make_tool,
    raising,
)

from weakincentives.errors import ToolDefinitionError
from weakincentives.filesystem import Filesystem, MemoryFilesystem
from weakincentives.prompt import (
    MarkdownSection,
    PolicyDecision,
    Prompt,
    PromptTemplate,
    QuotaPolicy,
    SequentialDependencyPolicy,
    Tool,
    ToolContext,
    ToolResult,
    if_offered,
    tool,
)
from weakincentives.prompt.contracts import CustomPrecondition, Effect, NotificationEffect
from weakincentives.runtime import (
    ConditionalBranch,
    ConditionalOutput,
    EventBus,
    ParallelOutput,
    Session,
    ToolCall,
    ToolComposer,
    ToolInvoked,
    aexecute_tool,
    conditional,
    execute_tool,
    execute_tools,
    parallel,
    sequence,
)
from weakincentives.testing import make_context, make_context_with_files

UNTOUCHED = (Plan(), {}, 0)


def fine(name: str, **options: Any) -> Tool[Step, None]:
    return make_tool(name, lambda p, c: None, **options)


def failing(name: str, **options: Any) -> Tool[Step, None]:
    return make_tool(name, raising(ValueError(f"{name} cannot")), **options)


def run(composed: Tool[Any, Any], **world: Any) -> tuple[World, ToolResult[Any]]:
    made = World([composed], **world)
    return made, made.call(composed.name)


def bare(*tools: Tool[Any, Any]) -> Session:
    """A session for tools, without resources that only one call at a time can have."""
    session = Session()
    session[Plan].register(AddStep, add_step)
    fs = MemoryFilesystem({"n.txt": ""})
    section = MarkdownSection(title="T", tools=tools, resources={Filesystem: fs})
    Prompt(PromptTemplate(sections=[section])).render(session)
    return session


@tool(reach="read")
def size(path: str, *, context: ToolContext) -> int:
    """Return how long a file is."""
    return len(context.filesystem.read(path))


# What a composed tool is


def test_a_sequence_is_called_after_its_members():
    composed = sequence([fine("fetch"), fine("store")])

    assert composed.name == "sequence-fetch-store"
    assert composed.title == "sequence:fetch→store"
    assert composed.parameters == fine("fetch").parameters


def test_titles_are_the_protocols_names():
    branches = [ConditionalBranch(lambda r, c: True, [fine("a")])] * 2

    assert parallel([fine("a"), fine("b")]).title == "parallel:a+b"
    assert conditional(branches).title == "conditional:2branches"
    nested = sequence([sequence([fine("a"), fine("b")]), fine("c")])
    assert nested.title == "sequence:sequence:a→b→c"


def test_a_derived_name_that_is_too_long_is_cut_and_stays_unique():
    long = [fine("x" * 40), fine("y" * 40)]
    other = [fine("x" * 40), fine("y" * 39 + "z")]

    names = {sequence(long).name, sequence(other).name, sequence(long).name}

    assert len(names) == 2
    assert all(len(name) == 64 for name in names)


def test_a_name_of_ones_own_is_held_to_what_providers_take():
    assert sequence([fine("a")], name="all-of-it").name == "all-of-it"
    with pytest.raises(ToolDefinitionError, match="must match"):
        sequence([fine("a")], name="n" * 65)


@pytest.mark.parametrize(
    ("reaches", "farthest"),
    [
        (["read", "read"], "read"),
        (["read", "reversible"], "reversible"),
        (["reversible", "irreversible", "compensable"], "irreversible"),
        (["reversible", None], None),
        ([None, "irreversible"], "irreversible"),
    ],
)
def test_the_reach_is_that_of_the_member_that_goes_farthest(reaches: list[Any], farthest: Any):
    members = [fine(f"t{n}", reach=reach) for n, reach in enumerate(reaches)]

    assert sequence(members).reach == farthest
    assert parallel(members).reach == farthest


def test_a_limit_is_the_sum_of_its_members_where_each_has_one():
    limited = [fine("a", timeout=1.0), fine("b", timeout=2.0)]

    assert sequence(limited).timeout == 3.0
    assert parallel(limited).timeout == 3.0  # they may have to wait for each other
    assert parallel(limited, timeout=0.5).timeout == 0.5
    assert sequence([*limited, fine("c")]).timeout is None


def test_the_composer_has_all_three():
    composer = ToolComposer()

    assert composer.sequence([fine("a")]).title == "sequence:a"
    assert composer.parallel([fine("a")]).title == "parallel:a"
    branch = ConditionalBranch(lambda r, c: True, [fine("a")])
    assert composer.conditional([branch]).title == "conditional:1branches"


# What cannot be composed


class TestRefused:
    @pytest.mark.parametrize("compose", [sequence, parallel, conditional])
    def test_nothing(self, compose: Any):
        with pytest.raises(ToolDefinitionError, match="needs at least one"):
            compose([])

    @pytest.mark.parametrize("compose", [sequence, parallel])
    def test_something_else_than_tools(self, compose: Any):
        with pytest.raises(ToolDefinitionError, match="takes tools that have a handler, got"):
            compose([lambda: None])

    def test_something_else_than_branches(self):
        with pytest.raises(ToolDefinitionError, match="at least one ConditionalBranch"):
            conditional([fine("a")])  # type: ignore[list-item]

    def test_a_tool_that_the_provider_runs(self):
        provided = Tool[None, None](name="search", description="Searches.", handler=None)

        with pytest.raises(ToolDefinitionError, match="that have a handler, got <tool search>"):
            sequence([provided])

    def test_one_tool_twice_in_a_list_for_parallel(self):
        with pytest.raises(ToolDefinitionError, match="twice; give the tools as a mapping"):
            parallel([size, size])

    def test_two_tools_of_one_name(self):
        with pytest.raises(ToolDefinitionError, match=r"two different tools called 'a'.*replace"):
            sequence([fine("a"), failing("a")])

    def test_a_parameter_that_members_mean_differently(self):
        @tool
        def count(path: int) -> int:
            """Count."""
            return path

        with pytest.raises(
            ToolDefinitionError, match=r"'count' and a tool before it both .* 'path'.*rename"
        ):
            parallel([size, count])

    def test_a_member_that_could_never_be_called(self):
        with pytest.raises(ToolDefinitionError, match=r"'size' needs path.*transform_output"):
            sequence([fine("a"), size])
        with pytest.raises(ToolDefinitionError, match="'size' needs path"):
            conditional([ConditionalBranch(lambda r, c: True, [fine("a"), size])])

    def test_parameters_that_cannot_be_told_apart(self):
        schema = {"type": "object", "allOf": [{"properties": {"a": {}}}]}
        raw = Tool.from_schema("raw", "Raw.", schema, lambda p, context: ToolResult.ok())
        with pytest.raises(ToolDefinitionError, match="as 'properties' at the top"):
            parallel([size, raw])

    def test_async_functions_where_plain_ones_are_asked(self):
        async def later(*_: Any) -> bool:
            return True

        with pytest.raises(ToolDefinitionError, match="condition must be a plain function"):
            ConditionalBranch(later, [fine("a")])
        with pytest.raises(ToolDefinitionError, match="transform_output must be a plain function"):
            sequence([fine("a")], transform_output=later)

    def test_no_concurrency_at_all(self):
        with pytest.raises(ToolDefinitionError, match="at least 1"):
            parallel([size], max_concurrency=0)


# One transaction


@pytest.mark.parametrize("compose", [sequence, parallel])
def test_members_that_all_succeed_are_kept_together(compose: Any):
    world, result = run(compose([fine("a"), fine("b"), fine("c")]))

    assert result.success
    assert result.message == "All 3 tools succeeded"
    assert world.state()[0] == Plan(("a", "a", "a"))


@pytest.mark.parametrize("compose", [sequence, parallel])
@pytest.mark.parametrize("stop_on_error", [True, False])
def test_a_member_that_fails_in_the_middle_leaves_nothing(compose: Any, stop_on_error: bool):
    composed = compose([fine("a"), failing("b"), fine("c")], stop_on_error=stop_on_error)

    world, result = run(composed)

    assert not result.success
    assert world.state() == UNTOUCHED
    assert "b (b cannot)" in result.message
    assert set(result.metadata.undone) == {"session", "Filesystem", "Counter"}


def test_without_stop_on_error_every_member_is_reported():
    _, result = run(sequence([fine("a"), failing("b"), fine("c")]))

    assert [r.success for r in result.value.results] == [True, False, True]
    assert result.failure is not None
    assert result.failure.code == "EXECUTION_FAILED"


def test_with_stop_on_error_the_failure_is_that_of_the_member():
    answered = ToolResult.error("not now", code="BUSY", recoverable=False, suggestions=["wait"])
    members = [fine("a"), make_tool("b", lambda p, c: answered), fine("c")]

    world, result = run(sequence(members, stop_on_error=True))

    assert result.failure is not None
    assert (result.failure.code, result.failure.recoverable) == ("BUSY", False)
    assert result.failure.suggestions == ("wait",)
    assert [record.tool_name for record in world.records] == ["a", "b", "sequence-a-b-c"]


def test_parallel_says_what_stop_on_error_kept_from_running():
    _, result = run(parallel([fine("a"), failing("b"), fine("c")], stop_on_error=True))

    assert list(result.value.results) == ["a", "b"]
    assert result.value.not_run == ("c",)
    assert "- c: not run" in result.render()


@pytest.mark.parametrize("compose", [sequence, parallel])
def test_keep_partial_keeps_what_succeeded_and_tells_what_did_not(compose: Any):
    world, result = run(compose([fine("a"), failing("b"), fine("c")], keep_partial=True))

    assert result.success
    assert result.message == "2 of 3 tools succeeded; failed: b (b cannot)"
    assert world.state()[0] == Plan(("a", "a"))
    assert world.state()[2] == 2


def test_keep_partial_with_nothing_to_keep_fails():
    world, result = run(sequence([failing("a"), failing("b")], keep_partial=True))

    assert not result.success
    assert world.state() == UNTOUCHED


OUTCOMES = st.lists(
    st.sampled_from(["fine", "raises", "fails", "crashes", "denied", "async", "async_fails"]),
    min_size=1,
    max_size=6,
)
BODIES: dict[str, Any] = {
    "fine": lambda p, c: None,
    "denied": lambda p, c: None,
    "raises": raising(ValueError("no")),
    "fails": lambda p, c: ToolResult.error("expected"),
    "crashes": raising(RuntimeError("boom")),
}


def member(number: int, outcome: str) -> Tool[Any, Any]:
    """A tool that changes everything under a name of its own, and then ends as it is told."""

    def handler(params: Step, *, context: ToolContext) -> ToolResult[None]:
        changing_everything(Step(f"m{number}"), context)
        answer = BODIES[outcome](params, context)
        return answer if isinstance(answer, ToolResult) else ToolResult.ok()

    async def async_handler(params: Step, *, context: ToolContext) -> ToolResult[None]:
        changing_everything(Step(f"m{number}"), context)
        await asyncio.sleep(0)
        if outcome == "async_fails":
            raise ValueError("no")
        return ToolResult.ok()

    chosen = async_handler if outcome.startswith("async") else handler
    name = f"{outcome}-{number}".replace("_", "-")
    return Tool[Step, None](name=name, description="M.", handler=chosen, reach="reversible")


class NoneDenied:
    name = "none_denied"

    def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
        return PolicyDecision(not tool.name.startswith("denied"), "denied")


@given(OUTCOMES, st.sampled_from([sequence, parallel]), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_composed_call_is_all_or_nothing_or_exactly_what_succeeded(
    outcomes: list[str], compose: Any, keep_partial: bool, stop_on_error: bool
):
    members = [member(n, outcome) for n, outcome in enumerate(outcomes)]
    composed = compose(
        members, keep_partial=keep_partial, stop_on_error=stop_on_error, name="composed"
    )
    world = World([fine("before"), composed], policies=[NoneDenied()])
    world.call("before", "before")

    result = world.call("composed")

    ran = dict(zip([m.name for m in members], range(len(members)), strict=True))
    answers = result.value.results
    if isinstance(answers, dict):
        answers = list(answers.values())
    expected = [outcomes[ran[r.metadata.tool_name]] in ("fine", "async") for r in answers]
    assert [r.success for r in answers] == expected
    done = [f"m{ran[r.metadata.tool_name]}" for r in answers if r.success]
    all_done = len(done) == len(members)
    assert result.success == (all_done or (keep_partial and bool(done)))
    kept = ["before", *(done if result.success else ())]
    plan, files, count = world.state()
    assert list(plan.steps) == kept
    assert files == {
        **{f"{step}.txt": "written" for step in kept},
        "journal.txt": "".join(f"{step}\n" for step in kept),
    }
    assert count == len(kept)
    if stop_on_error and compose is sequence:
        assert all(expected[:-1])


# Members are calls of their own


def test_each_member_leaves_a_record_that_its_composed_call_is_named_in():
    composed = sequence([fine("a"), fine("b")])
    world = World([composed])

    execute_tool(ToolCall(composed.name, {"name": "x"}, id="c1"), session=world.session)

    assert [(r.tool_name, r.call_id) for r in world.records] == [
        ("a", "c1.1"),
        ("b", "c1.2"),
        (composed.name, "c1"),
    ]


def test_policies_of_the_composed_tool_govern_its_members_too():
    """A tool is not freed of its rules by being part of another."""
    rule = SequentialDependencyPolicy({"b": {if_offered("test")}})
    world, result = run(sequence([fine("a"), fine("b")]), policies=[rule])

    assert not result.success
    assert "Cannot call 'b'" in result.message
    assert world.state() == UNTOUCHED


def test_policies_reach_the_members_of_a_branch():
    rule = SequentialDependencyPolicy({"b": {if_offered("test")}})
    composed = conditional([ConditionalBranch(lambda r, c: True, [fine("a"), fine("b")])])
    world, result = run(composed, policies=[rule])

    assert "Cannot call 'b'" in result.message
    assert world.state() == UNTOUCHED


def test_a_member_that_is_offered_itself_keeps_its_own_rules():
    a = fine("a")
    composed = sequence([a])
    world = World([a, composed], policies=[QuotaPolicy(max_calls=3)])

    assert world.call("a").success  # one
    assert world.call(composed.name).success  # two and three
    assert "a" in world.call("a").message
    assert len([r for r in world.records if r.ran]) == 3


def test_preconditions_of_a_member_are_checked_for_it():
    never = CustomPrecondition(description="The moon is full", check=lambda: False)
    world, result = run(sequence([fine("a"), fine("b", preconditions=[never])], stop_on_error=True))

    assert result.failure is not None
    assert result.failure.code == "PRECONDITION_FAILED"
    assert result.failure.suggestions == ("The moon is full",)
    assert world.state() == UNTOUCHED


def test_notifications_of_members_leave_only_when_the_whole_is_kept():
    told: list[str] = []
    bus = EventBus()
    bus.subscribe("done", lambda *event: told.append("done"))
    telling = fine("a", effects=[NotificationEffect(event="done")])
    good, bad = sequence([telling, fine("b")]), sequence([telling, failing("c")])
    losing = ConditionalBranch(lambda r, c: False, [telling])
    other = conditional([losing], fallback=[fine("d")])
    world = World([good, bad, other], resources={EventBus: bus})

    world.call(bad.name)
    world.call(other.name)
    assert told == []
    world.call(good.name)
    assert told == ["done"]


def test_effects_of_a_member_that_is_rolled_back_itself_are_rolled_back():
    told: list[str] = []
    effect = Effect(
        apply=lambda context, result: told.append("applied"),
        rollback=lambda context: told.append("rolled back"),
    )
    broken = Effect(apply=raising(ValueError("no")))
    run(sequence([fine("a", effects=[effect, broken])]))

    assert told == ["applied", "rolled back"]


def test_a_handler_that_is_called_directly_runs_its_members_all_the_same():
    composed = sequence([size, size])
    context = make_context_with_files({"a.txt": "abc"})
    assert composed.handler is not None

    result: Any = composed.handler(composed.parse({"path": "a.txt"}), context=context)

    assert [r.value for r in result.value.results] == [3, 3]


# Arguments


@dataclass(frozen=True)
class Found:
    path: str


@tool
def find(name: str, *, context: ToolContext) -> Found:
    """Find a file."""
    return Found(f"{name}.txt")


def test_output_becomes_the_next_tools_input():
    seen: list[Any] = []

    def onward(output: Any, next_tool: Tool[Any, Any]) -> dict[str, Any]:
        seen.append((output, next_tool.name))
        return {"path": output.path}

    composed = sequence([find, size], transform_output=onward)
    result = composed(name="a", context=make_context_with_files({"a.txt": "abc"}))

    assert result.value is not None
    assert result.value.results[-1].value == 3
    assert seen == [(Found("a.txt"), "size")]


def test_arguments_that_transform_output_gets_wrong_are_refused_by_the_next_tool():
    composed = sequence([find, size], transform_output=lambda output, tool: {"pth": 1})

    result = composed(name="a", context=make_context())

    assert '"pth": "Unknown field' in result.message


def test_without_a_transform_each_tool_gets_the_arguments_it_names():
    @tool
    def note(path: str, text: str, limit: int = 3) -> str:
        """Note."""
        return f"{path} {text} {limit}"

    context = make_context_with_files({"a.txt": "abc"})
    result = sequence([note, size])(path="a.txt", text="hi", context=context)

    assert result.value is not None
    assert [r.value for r in result.value.results] == ["a.txt hi 3", 3]


def test_parallel_takes_what_any_member_takes():
    @tool
    def note(text: str, limit: int = 3) -> str:
        """Note."""
        return f"{text} {limit}"

    @tool
    def shout(text: str, limit: int = 5) -> str:
        """Shout."""
        return f"{text.upper()} {limit}"

    composed = parallel([size, note, shout])
    context = make_context_with_files({"a.txt": "abc"})

    shown = composed.parameters
    assert list(shown["properties"]) == ["path", "text", "limit"]
    assert shown["required"] == ["path", "text"]
    assert "default" not in shown["properties"]["limit"]  # each has its own
    result = composed(path="a.txt", text="hi", context=context)
    assert result.value is not None
    answers = {key: r.value for key, r in result.value.results.items()}
    assert answers == {"size": 3, "note": "hi 3", "shout": "HI 5"}
    assert "Unknown field" in composed(path="a", text="b", pth="c", context=context).message


def test_types_of_one_name_that_differ_do_not_get_mixed_up():
    def made(kind: Any, name: str) -> Tool[Any, Any]:
        def handler(params: Any, *, context: ToolContext) -> ToolResult[Any]:
            return ToolResult.ok(str(getattr(params, name).mode))

        options = make_dataclass("Options", [("mode", kind)])
        params = make_dataclass(f"{name}Params", [(name, options)])
        return Tool(
            name=name, description="T.", handler=handler, params_type=params,
            result_type=Any, checked=False,
        )  # fmt: skip

    composed = parallel([made(Literal["fast", "slow"], "left"), made(int, "right")])

    result = composed(left={"mode": "fast"}, right={"mode": 7}, context=make_context())
    assert result.value is not None
    assert {k: r.value for k, r in result.value.results.items()} == {"left": "fast", "right": "7"}
    assert not composed(left={"mode": 7}, right={"mode": 7}, context=make_context()).success


def test_types_that_refer_to_types_of_one_name_do_not_get_mixed_up():
    def made(kind: Any, name: str) -> Tool[Any, Any]:
        def handler(params: Any, *, context: ToolContext) -> ToolResult[Any]:
            return ToolResult.ok(str(getattr(params, name).options.mode))

        options = make_dataclass("Options", [("mode", kind)])
        outer = make_dataclass("Outer", [("options", options)])
        params = make_dataclass(f"{name}Params", [(name, outer)])
        return Tool(
            name=name, description="T.", handler=handler, params_type=params,
            result_type=Any, checked=False,
        )  # fmt: skip

    composed = parallel([made(str, "left"), made(int, "right")])

    given = {"left": {"options": {"mode": "fast"}}, "right": {"options": {"mode": 7}}}
    result = composed(given, context=make_context())
    assert result.value is not None
    assert {k: r.value for k, r in result.value.results.items()} == {"left": "fast", "right": "7"}


def test_one_tool_twice_takes_its_arguments_under_its_keys():
    composed = parallel({"old": size, "new": size})
    context = make_context_with_files({"a.txt": "abc", "b.txt": "abcd"})

    result = composed(old={"path": "a.txt"}, new={"path": "b.txt"}, context=context)

    assert isinstance(result.value, ParallelOutput)
    assert {key: r.value for key, r in result.value.results.items()} == {"old": 3, "new": 4}
    assert composed.parameters["required"] == ["old", "new"]


# Beside each other


def meeting(name: str, barrier: threading.Barrier) -> Tool[Any, Any]:
    """A tool that ends only when all others of the barrier run, too."""

    def handler(params: Step, *, context: ToolContext) -> ToolResult[None]:
        barrier.wait(120)
        context.session.dispatch(AddStep(name))
        return ToolResult.ok()

    return Tool[Step, None](
        name=name, description="Meets.", handler=handler, reach="reversible", concurrent=True
    )


def test_members_that_may_run_concurrently_each_other_do():
    barrier = threading.Barrier(3)
    composed = parallel([meeting(n, barrier) for n in "abc"])
    session = bare(composed)

    assert execute_tool(ToolCall(composed.name, {"name": "x"}), session=session).success
    assert session[Plan].latest() == Plan(("a", "b", "c"))


def test_max_concurrency_bounds_how_many_run_at_once():
    most: list[int] = []
    running: set[str] = set()

    def make(name: str) -> Tool[Any, Any]:
        async def handler(params: Step, *, context: ToolContext) -> ToolResult[None]:
            running.add(name)
            most.append(len(running))
            await asyncio.sleep(0)
            running.discard(name)
            return ToolResult.ok()

        return Tool[Step, None](name=name, description="T.", handler=handler, reach="read")

    composed = parallel([make(n) for n in "abcdef"], max_concurrency=2)
    execute_tool(ToolCall(composed.name, {"name": "x"}), session=bare(composed))

    assert max(most) == 2


def test_parallel_updates_of_one_value_are_all_kept():
    """Two members that read and write the same come out as if one had run after the other."""
    met = threading.Barrier(2)
    first = {"a", "b"}

    def make(name: str) -> Tool[Any, Any]:
        def handler(params: Step, *, context: ToolContext) -> ToolResult[None]:
            before = context.filesystem.read("n.txt")
            if name in first:  # the second time it is alone
                met.wait(120)
                first.discard(name)
            context.filesystem.write("n.txt", f"{before}{name}")
            return ToolResult.ok()

        return Tool[Step, None](
            name=name, description="T.", handler=handler, reach="reversible", concurrent=True
        )

    composed = sequence([parallel([make("a"), make("b")]), size.replace(reach="reversible")],
                        transform_output=lambda output, tool: {"path": "n.txt"})  # fmt: skip
    result = execute_tool(ToolCall(composed.name, {"name": "x"}), session=bare(composed))

    assert result.value.results[-1].value == 2


def test_a_composed_tool_runs_beside_others_only_if_all_its_members_may():
    async def quick(params: Step, *, context: ToolContext) -> ToolResult[None]:
        return ToolResult.ok()

    free = Tool[Step, None](name="free", description="T.", handler=quick, reach="reversible")
    alone = fine("alone", reach="reversible")
    world = World([sequence([free], name="all"), sequence([free, alone], name="some")])
    offers = world.prompt.rendered.offers

    assert offers["all"].may_run_concurrently
    assert not offers["some"].may_run_concurrently


def test_composed_tools_run_beside_each_other_and_stay_transactions():
    barrier = threading.Barrier(2)
    good = sequence([meeting("a", barrier)], name="good")

    def refuse(params: Step, *, context: ToolContext) -> ToolResult[None]:
        context.session.dispatch(AddStep("refused"))
        return ToolResult.error("no")

    refusing = Tool[Step, None](
        name="refuse", description="T.", handler=refuse, reach="reversible", concurrent=True
    )
    bad = sequence([meeting("b", barrier), refusing], name="bad")
    session = bare(good, bad)

    calls = [ToolCall("good", {"name": "x"}), ToolCall("bad", {"name": "x"})]
    results = execute_tools(calls, session=session)

    assert [r.success for r in results] == [True, False]
    assert session[Plan].latest() == Plan(("a",))


def test_a_timeout_ends_and_rolls_back_the_whole():
    def hang(params: Step, context: ToolContext) -> None:
        context.signal.wait(120)

    world, result = run(
        parallel([fine("a"), make_tool("b", hang)], timeout=0.05, keep_partial=True)
    )

    assert result.failure is not None
    assert result.failure.code == "TIMEOUT"
    assert world.state() == UNTOUCHED


def test_members_with_limits_are_reported_one_by_one():
    def hang(params: Step, context: ToolContext) -> None:
        context.signal.wait(120)

    members = [fine("a", timeout=600.0), make_tool("b", hang, timeout=0.05)]
    world, result = run(parallel(members, keep_partial=True))

    assert result.success
    assert result.value.results["b"].failure.code == "TIMEOUT"
    assert world.state()[0] == Plan(("a",))


@pytest.mark.parametrize("compose", [sequence, parallel])
def test_composed_tools_work_on_the_callers_event_loop(compose: Any):
    loops: list[Any] = []

    def make(name: str) -> Tool[Any, Any]:
        async def handler(params: Step, *, context: ToolContext) -> ToolResult[None]:
            loops.append(asyncio.get_running_loop())
            return ToolResult.ok()

        return Tool[Step, None](name=name, description="T.", handler=handler)

    composed = compose([make("a"), make("b"), fine("c")])
    world = World([composed])

    async def main() -> None:
        result = await aexecute_tool(ToolCall(composed.name, {"name": "x"}), session=world.session)
        assert result.success
        assert loops == [asyncio.get_running_loop()] * 2

    asyncio.run(main())


def test_sync_members_need_no_event_loop():
    assert not sequence([fine("a"), fine("b")]).needs_loop


# Branches


def test_the_branch_whose_condition_holds_is_taken():
    asked: list[tuple[str, bool]] = []

    def asking(name: str, answer: bool) -> Any:
        def condition(result: ToolResult[Any], context: ToolContext) -> bool:
            asked.append((name, result.success))
            return answer

        return condition

    composed = conditional(
        [
            ConditionalBranch(asking("first", False), [fine("a"), fine("never")]),
            ConditionalBranch(asking("second", True), [fine("b"), fine("c")]),
            ConditionalBranch(asking("third", True), [fine("d")]),
        ]
    )
    world, result = run(composed)

    assert asked == [("first", True), ("second", True)]
    assert isinstance(result.value, ConditionalOutput)
    assert result.value.branch == 1
    assert [r.metadata.tool_name for r in result.value.results] == ["b", "c"]
    assert result.message == "done"
    assert world.state()[2] == 2


def test_a_losing_branch_leaves_nothing_for_the_next_to_see():
    seen: list[Any] = []

    def look(params: Step, context: ToolContext) -> None:
        seen.append(context.filesystem.exists("lost.txt"))

    def lose(params: Step, context: ToolContext) -> None:
        context.filesystem.write("lost.txt", "x")

    composed = conditional(
        [ConditionalBranch(lambda r, c: False, [make_tool("lose", lose)])],
        fallback=[make_tool("look", look)],
    )
    world, result = run(composed)

    assert result.success
    assert result.value.branch is None
    assert seen == [False]
    assert world.state()[0] == Plan(("a",))
    assert world.state()[2] == 1


def test_a_condition_may_ask_for_a_failure():
    branch = ConditionalBranch(lambda r, c: not r.success, [failing("try"), fine("mend")])
    world, result = run(conditional([branch]))

    assert result.success
    assert [r.success for r in result.value.results] == [False, True]
    assert world.state()[0] == Plan(("a",))


def test_a_failure_after_the_match_fails_the_whole_and_tries_no_other_branch():
    composed = conditional(
        [
            ConditionalBranch(lambda r, c: True, [fine("a"), failing("b"), fine("c")]),
            ConditionalBranch(lambda r, c: True, [fine("d")]),
        ]
    )
    world, result = run(composed)

    assert (result.success, result.message) == (False, "b cannot")
    assert world.state() == UNTOUCHED
    assert "d" not in {record.tool_name for record in world.records}


def test_no_match_and_no_fallback_is_told():
    world, result = run(conditional([ConditionalBranch(lambda r, c: False, [fine("a")])]))

    assert result.failure is not None
    assert (result.failure.code, result.failure.recoverable) == ("NO_BRANCH_MATCHED", False)
    assert result.message == "No conditional branch matched and no fallback provided"
    assert world.state() == UNTOUCHED


def test_a_condition_that_raises_fails_the_call():
    def broken(result: ToolResult[Any], context: ToolContext) -> bool:
        raise ValueError("cannot tell")

    composed = conditional([ConditionalBranch(broken, [fine("a")])], fallback=[fine("b")])
    world, result = run(composed)

    assert (result.success, result.message) == (False, "cannot tell")
    assert world.state() == UNTOUCHED


def test_what_a_losing_branch_did_outside_is_not_hidden():
    sent = fine("send", reach="irreversible")
    composed = conditional([ConditionalBranch(lambda r, c: False, [sent])], fallback=[fine("a")])
    _, result = run(composed)

    assert result.success
    assert "not undone: what 'send' did outside" in result.message


def test_a_value_reaches_the_session_once():
    """The member's own call hands it over; the composed call's value is another."""
    adding = make_tool("add", lambda p, c: ToolResult.ok(AddStep("once")), AddStep)
    branch = ConditionalBranch(lambda r, c: True, [adding])
    for composed in (sequence([adding]), parallel([adding]), conditional([branch])):
        world, _ = run(composed)
        assert world.session[Plan].latest() == Plan(("a", "once"))


# Composed again


@pytest.mark.parametrize("keep_partial", [True, False])
def test_a_composed_tool_can_be_a_member(keep_partial: bool):
    inner = sequence([fine("a"), failing("b")], keep_partial=keep_partial)
    branch = ConditionalBranch(lambda r, c: True, [fine("d")])
    outer = parallel([inner, conditional([branch])], keep_partial=True)

    world, result = run(outer)

    assert result.success
    assert world.state()[2] == (2 if keep_partial else 1)
    assert {r.tool_name for r in world.session[ToolInvoked].all()} >= {"a", "b", "d", inner.name}


def test_parallel_inside_parallel_runs_side_by_side():
    barrier = threading.Barrier(4)
    left = parallel([meeting("a", barrier), meeting("b", barrier)], name="left")
    right = parallel([meeting("c", barrier), meeting("d", barrier)], name="right")

    composed = parallel([left, right])
    session = bare(composed)

    assert execute_tool(ToolCall(composed.name, {"name": "x"}), session=session).success
    assert session[Plan].latest() == Plan(("a", "b", "c", "d"))


# What the model sees


def test_the_model_is_told_what_became_of_each():
    _, result = run(sequence([fine("a"), failing("b")]))

    assert result.render() == (
        "1 of 2 tools failed: b (b cannot)\n"
        "What the others changed in session and files was rolled back.\n"
        "1. a: done, then rolled back as far as possible\n"
        "   done\n"
        "2. b: failed (VALIDATION_FAILED)\n"
        "   b cannot"
    )


def test_parallel_results_are_shown_under_their_keys():
    composed = parallel({"old": size, "new": size})
    context = make_context_with_files({"a.txt": "abc", "b.txt": "abcd"})

    result = composed(old={"path": "a.txt"}, new={"path": "b.txt"}, context=context)

    assert result.render() == "All 2 tools succeeded\n- old: done\n   3\n- new: done\n   4"


def test_a_read_only_composition_changes_nothing():
    def write(params: Step, *, context: ToolContext) -> ToolResult[None]:
        context.filesystem.write("x.txt", "x")
        return ToolResult.ok()

    lying = Tool[Step, None](name="lying", description="T.", handler=write, reach="read")
    world, result = run(sequence([lying]))

    assert not result.success
    assert world.state() == UNTOUCHED


# As the Protocol says


def test_an_empty_branch_is_skipped():
    """The Protocol: ``if (branch.tools.length === 0) continue;``"""
    asked: list[int] = []

    def condition(number: int) -> Any:
        return lambda result, context: asked.append(number) or True

    branches = [ConditionalBranch(condition(1), []), ConditionalBranch(condition(2), [fine("b")])]

    composed = conditional(branches)
    world, result = run(composed)

    assert composed.title == "conditional:2branches"
    assert result.success
    assert result.value.branch == 1
    assert asked == [2]
    assert world.state()[0] == Plan(("a",))


def test_without_a_branch_that_has_tools_the_fallback_is_taken():
    empty = ConditionalBranch(lambda result, context: True, [])

    _, result = run(conditional([empty], fallback=[fine("b")]))

    assert result.success
    assert result.value.branch is None


def test_a_conditional_of_empty_branches_alone_matches_nothing():
    empty = ConditionalBranch(lambda result, context: True, [])

    result = conditional([empty])(context=make_context())

    assert result.failure is not None
    assert result.failure.code == "NO_BRANCH_MATCHED"
    assert result.failure.recoverable is False
    assert result.failure.message == "No conditional branch matched and no fallback provided"


@pytest.mark.parametrize("keep_partial", [True, False])
@pytest.mark.parametrize("compose", [sequence, parallel])
def test_a_member_that_times_out_is_reported_like_any_other_failure(
    compose: Callable[..., Tool[Any, Any]], keep_partial: bool
):
    """The timeout of the whole is made of the members': theirs come first."""

    @tool(reach="reversible", timeout=0.05, concurrent=True)
    def write(context: ToolContext) -> str:
        """Write a file."""
        context.filesystem.write("a.txt", "written")
        return "written"

    @tool(reach="reversible", timeout=0.05, concurrent=True)
    def hang(context: ToolContext) -> None:
        """Never end."""
        context.signal.wait(60)

    context = make_context()
    result = compose([write.replace(timeout=30.0), hang], keep_partial=keep_partial)(
        context=context
    )
    alone = compose([hang])(context=make_context())

    assert result.success is keep_partial
    assert "1 of 2 tools" in result.message
    assert context.filesystem.exists("a.txt") is keep_partial
    assert alone.failure is not None
    assert "hang (Tool 'hang' timed out after 0.05 s)" in alone.message


def test_a_timeout_of_the_whole_ends_it():
    @tool(reach="read", timeout=30.0)
    def hang(context: ToolContext) -> None:
        """Never end."""
        context.signal.wait(60)

    for whole in (parallel([hang], timeout=0.05), sequence([hang]).replace(timeout=0.05)):
        result = whole(context=make_context())
        assert result.failure is not None
        assert (result.failure.code, result.message) == (
            "TIMEOUT",
            f"Tool '{whole.name}' timed out after 0.05 s",
        )


@pytest.mark.parametrize("beside", [True, False])
def test_a_parallel_member_that_raises_failed_to_execute(beside: bool):
    """The Protocol: ``code: 'EXECUTION_FAILED', message: settled.reason.message``."""

    @tool(reach="read", concurrent=beside)
    def broken() -> None:
        """Break."""
        raise RuntimeError("disk on fire")

    @tool(reach="read", concurrent=beside)
    def down() -> None:
        """Reach nobody."""
        raise ConnectionError("reset")

    result = parallel([broken, down])(context=make_context())

    raised, unreached = (result.value.results[name].failure for name in ("broken", "down"))
    assert (raised.code, raised.message, raised.recoverable) == (
        "EXECUTION_FAILED",
        "disk on fire",
        False,
    )
    assert unreached.code == "NETWORK"  # says more, and that another try may succeed
    assert result.failure is not None
    assert result.failure.code == "EXECUTION_FAILED"
