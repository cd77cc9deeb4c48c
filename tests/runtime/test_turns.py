"""The calls of one turn: run together where they may, kept as if one after the other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from weakincentives.errors import (
    DeadlineExceededError,
    PromptEvaluationError,
    ViewClosed,
    VisibilityExpansionRequired,
)
from weakincentives.filesystem import Filesystem, MemoryFilesystem
from weakincentives.prompt import (
    MarkdownSection,
    PolicyDecision,
    Prompt,
    PromptTemplate,
    QuotaPolicy,
    RateLimitPolicy,
    ReadBeforeWritePolicy,
    Tool,
    ToolContext,
    ToolResult,
)
from weakincentives.resources import Binding, Scope
from weakincentives.runtime import (
    Session,
    SlicePolicy,
    ToolCall,
    ToolInvoked,
    aexecute_tool,
    aexecute_tools,
    execute_tool,
    execute_tools,
    slice_policy,
)


@dataclass(frozen=True)
class Note:
    text: str


@slice_policy(SlicePolicy.LOG)
@dataclass(frozen=True)
class Line:
    text: str


@dataclass(frozen=True)
class Total:
    value: int


@dataclass(frozen=True)
class Params:
    text: str = ""
    path: str = "x"


Handler = Callable[..., Any]


def tool(name: str, handler: Handler, **options: Any) -> Tool[Params, None]:
    options.setdefault("reach", "reversible")
    return Tool[Params, None](name=name, description="Work.", handler=handler, **options)


def done(message: str = "done") -> ToolResult[None]:
    return ToolResult.ok(None, message=message)


@dataclass
class Desk:
    """A session and files behind a prompt with some tools."""

    tools: Iterable[Tool[Any, Any]]
    policies: Iterable[Any] = ()
    resources: dict[type, Any] = field(default_factory=dict)
    session: Session = field(default_factory=Session)
    fs: MemoryFilesystem = field(default_factory=lambda: MemoryFilesystem({"x": "old"}))
    heard: list[ToolInvoked] = field(default_factory=list)

    def __post_init__(self) -> None:
        section = MarkdownSection(
            title="Work", tools=list(self.tools), policies=list(self.policies)
        )
        self.prompt = Prompt(PromptTemplate(sections=[section])).bind(
            resources={Filesystem: self.fs, **self.resources}
        )
        self.prompt.render(self.session)
        self.session.dispatcher.subscribe(ToolInvoked, self.heard.append)

    def turn(self, *calls: ToolCall, **options: Any) -> tuple[ToolResult[Any], ...]:
        return execute_tools(calls, session=self.session, **options)

    async def aturn(self, *calls: ToolCall, **options: Any) -> tuple[ToolResult[Any], ...]:
        return await aexecute_tools(calls, session=self.session, **options)

    @property
    def records(self) -> tuple[ToolInvoked, ...]:
        return self.session[ToolInvoked].all()

    @property
    def notes(self) -> list[str]:
        return [note.text for note in self.session[Note].all()]

    @property
    def total(self) -> int:
        latest = self.session[Total].latest()
        return 0 if latest is None else latest.value


def call(name: str, text: str = "", **params: Any) -> ToolCall:
    return ToolCall(name, {"text": text, **params})


async def note(params: Params, *, context: ToolContext) -> ToolResult[None]:
    await asyncio.sleep(0)
    context.session.dispatch(Note(params.text))
    return done(params.text)


async def bump(params: Params, *, context: ToolContext) -> ToolResult[None]:
    """Read, let others run, write: what loses updates where nothing keeps calls apart."""
    latest = context.session[Total].latest()
    await asyncio.sleep(0)
    context.session[Total].seed(Total((0 if latest is None else latest.value) + 1))
    return done()


async def fail(params: Params, *, context: ToolContext) -> ToolResult[None]:
    context.session.dispatch(Note("failed"))
    context.session.dispatch(Line("failed"))
    context.filesystem.write("failed", "x")
    await asyncio.sleep(0)
    raise ValueError("no")


class Crowd:
    """Counts the handlers that are under way."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.now -= 1


class TestTogether:
    @pytest.mark.parametrize("entry", ["sync", "async"])
    def test_two_async_tools_that_wait_for_each_other_finish(self, entry: str) -> None:
        barriers: list[asyncio.Barrier] = []

        async def meet(params: Params, *, context: ToolContext) -> ToolResult[None]:
            if not barriers:
                barriers.append(asyncio.Barrier(2))
            await asyncio.wait_for(barriers[0].wait(), 120)
            return done("met")

        desk = Desk([tool("meet", meet, reach="read")])
        calls = [call("meet"), call("meet")]

        results = desk.turn(*calls) if entry == "sync" else asyncio.run(desk.aturn(*calls))

        assert [result.message for result in results] == ["met", "met"]

    def test_two_sync_tools_that_wait_for_each_other_finish(self) -> None:
        barrier = threading.Barrier(2, timeout=120)

        def meet(params: Params, *, context: ToolContext) -> ToolResult[None]:
            barrier.wait()
            return done("met")

        desk = Desk([tool("meet", meet, concurrent=True)])

        assert [r.message for r in desk.turn(call("meet"), call("meet"))] == ["met", "met"]

    @pytest.mark.parametrize(
        ("handler", "options"),
        [
            ("sync", {}),
            ("sync", {"reach": None, "concurrent": True}),
            ("async", {"reach": None}),
            ("async", {"reach": "compensable"}),
            ("async", {"reach": "irreversible"}),
            ("async", {"writes": "command"}),
            ("async", {"writes": "external"}),
        ],
    )
    def test_all_others_run_alone(self, handler: str, options: dict[str, Any]) -> None:
        crowd = Crowd()

        async def asynchronous(params: Params, *, context: ToolContext) -> ToolResult[None]:
            with crowd:
                await asyncio.sleep(0.001)
                return done()

        def synchronous(params: Params, *, context: ToolContext) -> ToolResult[None]:
            with crowd:
                return done()

        chosen = asynchronous if handler == "async" else synchronous
        desk = Desk([tool("work", chosen, **options)])

        results = desk.turn(*(call("work") for _ in range(3)))

        assert [result.success for result in results] == [True] * 3
        assert crowd.most == 1

    def test_one_that_runs_alone_sees_what_came_before_it_and_not_what_comes_after(self) -> None:
        def look(params: Params, *, context: ToolContext) -> ToolResult[None]:
            return done(",".join(n.text for n in context.session[Note].all()))

        desk = Desk([tool("note", note), tool("look", look, reach=None)])

        results = desk.turn(
            call("note", "a"), call("note", "b"), call("look"), call("note", "c"), call("look")
        )

        assert [result.message for result in results] == ["a", "b", "a,b", "c", "a,b,c"]

    def test_answers_and_records_come_in_call_order_whoever_is_first(self) -> None:
        async def after(params: Params, *, context: ToolContext) -> ToolResult[None]:
            for _ in range(int(params.text)):
                await asyncio.sleep(0)
            context.session.dispatch(Note(params.text))
            return done(params.text)

        desk = Desk([tool("after", after)])

        results = desk.turn(*(call("after", text) for text in ("9", "5", "7", "0")))

        assert [result.message for result in results] == ["9", "5", "7", "0"]
        assert desk.notes == ["9", "5", "7", "0"]
        assert [record.result.message for record in desk.records] == ["9", "5", "7", "0"]
        assert [record.place for record in desk.records] == [0, 1, 2, 3]
        assert desk.heard == list(desk.records)

    def test_unknown_tools_and_bad_arguments_stand_in_their_places(self) -> None:
        desk = Desk([tool("note", note)])

        results = desk.turn(
            call("note", "a"),
            call("nothing"),
            call("note", "b"),
            ToolCall("note", {"text": 1}),
            call("note", "c"),
        )

        codes = [result.failure and result.failure.code for result in results]
        assert codes == [None, "TOOL_NOT_FOUND", None, "INVALID_ARGUMENTS", None]
        assert desk.notes == ["a", "b", "c"]
        assert [record.place for record in desk.records] == [0, 1, 2, 3, 4]

    def test_a_turn_without_calls_has_no_answers(self) -> None:
        desk = Desk([])

        assert desk.turn() == ()
        assert asyncio.run(desk.aturn()) == ()


class TestMaxConcurrency:
    @pytest.mark.parametrize("concurrent", [False, True])
    @pytest.mark.parametrize("limit", [1, 2, 3])
    def test_no_more_handlers_are_under_way_at_once(self, limit: int, concurrent: bool) -> None:
        crowd = Crowd()
        meeting = threading.Barrier(limit, timeout=120)

        async def work(params: Params, *, context: ToolContext) -> ToolResult[None]:
            with crowd:
                for _ in range(20):
                    await asyncio.sleep(0)
                return done()

        def threaded(params: Params, *, context: ToolContext) -> ToolResult[None]:
            with crowd:
                meeting.wait()
                return done()

        handler = threaded if concurrent else work
        desk = Desk([tool("work", handler, reach="read", concurrent=concurrent or None)])

        results = desk.turn(*[call("work")] * 6, max_concurrency=limit)

        assert all(result.success for result in results)
        assert crowd.most == limit

    def test_it_is_at_least_one(self) -> None:
        with pytest.raises(ValueError, match="max_concurrency must be at least 1, got 0"):
            Desk([]).turn(max_concurrency=0)

    def test_a_hundred_calls_of_one_turn_lose_no_update(self) -> None:
        desk = Desk([tool("bump", bump)])

        results = desk.turn(*[call("bump")] * 100)

        assert all(result.success for result in results)
        assert desk.total == 100


class TestTakenAgain:
    def test_the_record_says_how_often_and_why(self) -> None:
        async def copy(params: Params, *, context: ToolContext) -> ToolResult[None]:
            text = context.filesystem.read("x")
            await asyncio.sleep(0)
            context.filesystem.write("x", text + params.text)
            return done()

        desk = Desk([tool("bump", bump), tool("copy", copy), tool("note", note)])

        desk.turn(
            call("bump"), call("copy", "1"), call("bump"), call("note", "a"), call("copy", "2")
        )

        assert desk.total == 2
        assert desk.fs.read("x") == "old12"
        assert [(record.attempts, record.conflicts) for record in desk.records] == [
            (1, ()),
            (1, ()),
            (2, ("Total",)),
            (1, ()),
            (2, ("x",)),
        ]

    def test_a_call_that_depends_on_less_is_kept_as_it_is(self) -> None:
        """Appends, counts and narrow questions merge."""

        async def narrow(params: Params, *, context: ToolContext) -> ToolResult[None]:
            none = context.session[Note].select(lambda notes: len(notes) == 0)
            some = context.session[Note].select(lambda notes: len(notes) < 10)
            await asyncio.sleep(0)
            context.session[Note].append(Note(params.text))
            return done(f"{none if params.text == 'first' else some}")

        desk = Desk([tool("note", note), tool("narrow", narrow)])

        desk.turn(*(call("note", text) for text in "abc"))
        results = desk.turn(call("note", "d"), call("narrow", "e"), call("narrow", "f"))

        assert [result.message for result in results] == ["d", "True", "True"]
        assert desk.notes == ["a", "b", "c", "d", "e", "f"]
        assert {record.attempts for record in desk.records} == {1}

    def test_a_failure_that_an_earlier_call_would_have_prevented_is_none(self) -> None:
        async def needs(params: Params, *, context: ToolContext) -> ToolResult[None]:
            if not context.filesystem.exists(params.path):
                return ToolResult.error("nothing there")
            return done(context.filesystem.read(params.path))

        async def make(params: Params, *, context: ToolContext) -> ToolResult[None]:
            await asyncio.sleep(0)
            context.filesystem.write(params.path, "made")
            return done()

        desk = Desk([tool("needs", needs, reach="read"), tool("make", make)])

        results = desk.turn(
            call("needs", path="y"), call("make", path="y"), call("needs", path="y")
        )

        assert [result.message for result in results] == ["nothing there", "done", "made"]

    def test_what_a_nested_call_was_told_counts_also_when_it_failed(self) -> None:
        def looks(params: Params, *, context: ToolContext) -> ToolResult[None]:
            context.filesystem.read("y")
            return done("there")

        inner = tool("inner", looks)

        async def outer(params: Params, *, context: ToolContext) -> ToolResult[None]:
            await asyncio.sleep(0)
            return done(inner(Params(), context=context).message)

        async def make(params: Params, *, context: ToolContext) -> ToolResult[None]:
            await asyncio.sleep(0)
            context.filesystem.write("y", "made")
            return done()

        desk = Desk([tool("make", make), tool("outer", outer)])

        results = desk.turn(call("make"), call("outer"))

        assert [result.message for result in results] == ["done", "there"]

    def test_what_was_logged_in_an_attempt_that_does_not_count_is_not_there(self) -> None:
        async def logs(params: Params, *, context: ToolContext) -> ToolResult[None]:
            context.session.dispatch(Line(f"{len(context.session[Note])} notes"))
            return await note(params, context=context)

        desk = Desk([tool("logs", logs)])

        desk.turn(call("logs", "a"), call("logs", "b"))

        assert [line.text for line in desk.session[Line]] == ["0 notes", "1 notes"]

    def test_a_handler_of_an_attempt_that_does_not_count_is_told_and_fenced_off(self) -> None:
        told: list[str | None] = []
        refused = threading.Event()

        async def slow(params: Params, *, context: ToolContext) -> ToolResult[None]:
            if context.session[Note].latest() is not None:
                return done("saw it")  # at once: no machine is too slow for that
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            while not context.signal.cancelled:
                await asyncio.sleep(0)
            told.append(context.signal.reason)
            with pytest.raises(ViewClosed):
                context.session.dispatch(Note("late"))
            refused.set()
            return done()

        desk = Desk([tool("note", note), tool("slow", slow, timeout=0.05)])

        results = desk.turn(call("note", "a"), call("slow"))

        assert results[1].message == "saw it"
        assert refused.wait(120)
        assert told == ["the call is re-run"]
        assert desk.notes == ["a"]

    def test_a_session_that_others_change_all_the_time_ends_in_a_conflict(self) -> None:
        attempts: list[int] = []

        async def disturbed(params: Params, *, context: ToolContext) -> ToolResult[None]:
            attempts.append(len(context.session[Note]))
            # A bare thread is outside the call: it changes the session itself.
            outside = threading.Thread(target=lambda: desk.session.dispatch(Note("outside")))
            outside.start()
            outside.join()
            context.session.dispatch(Note("inside"))
            return done()

        desk = Desk([tool("note", note), tool("disturbed", disturbed)])

        results = desk.turn(call("note", "a"), call("disturbed"), call("note", "b"))

        assert [result.success for result in results] == [True, False, True]
        assert results[1].failure is not None
        assert results[1].failure.code == "CONFLICT"
        assert desk.records[1].attempts == len(attempts) == 5
        assert desk.records[1].conflicts == ("Note",)
        assert desk.notes.count("inside") == 0
        assert {"a", "b"} <= set(desk.notes)

    def test_going_back_to_a_snapshot_that_an_earlier_call_made_unusable_fails(self) -> None:
        """As it does one after the other: what can be restored counts as read."""
        snapshots: list[Any] = []

        async def back(params: Params, *, context: ToolContext) -> ToolResult[None]:
            await asyncio.sleep(0)
            context.session.restore(snapshots[int(params.text)])
            return done()

        messages: list[list[bool]] = []
        for limit in (None, 1):
            desk = Desk([tool("back", back), tool("note", note)])
            desk.session.dispatch(Note("a"))
            snapshots[:] = [desk.session.snapshot()]
            desk.session.dispatch(Note("b"))
            snapshots.append(desk.session.snapshot())
            desk.session.dispatch(Note("c"))

            results = desk.turn(call("back", "0"), call("back", "1"), max_concurrency=limit)

            messages.append([result.success for result in results])
            assert desk.notes == ["a"]
        assert messages == [[True, False]] * 2

    def test_a_tool_that_only_reads_cannot_go_back_and_take_others_changes_with_it(self) -> None:
        """Also where nothing had changed yet when it tried."""
        snapshots: list[Any] = []

        async def back(params: Params, *, context: ToolContext) -> ToolResult[None]:
            context.session.restore(snapshots[0])
            return done()

        desk = Desk([tool("note", note), tool("back", back, reach="read")])
        snapshots.append(desk.session.snapshot())

        results = desk.turn(call("note", "a"), call("back"))

        assert [result.success for result in results] == [True, False]
        assert "must not change anything" in results[1].message
        assert desk.notes == ["a"]


class TestFailures:
    def test_a_failing_call_does_not_disturb_its_siblings(self) -> None:
        desk = Desk([tool("note", note), tool("fail", fail)])

        results = desk.turn(call("note", "a"), call("fail"), call("note", "b"), call("fail"))

        assert [result.success for result in results] == [True, False, True, False]
        assert desk.notes == ["a", "b"]
        assert desk.fs.glob("**/*") == ("x",)
        assert [line.text for line in desk.session[Line]] == ["failed", "failed"]

    def test_a_call_that_times_out_does_not_disturb_its_siblings(self) -> None:
        async def hang(params: Params, *, context: ToolContext) -> ToolResult[None]:
            context.session.dispatch(Note("hanging"))
            await asyncio.sleep(60)
            return done()

        desk = Desk([tool("note", note), tool("hang", hang, timeout=0.01)])

        results = desk.turn(call("note", "a"), call("hang"), call("note", "b"))

        assert [r.failure and r.failure.code for r in results] == [None, "TIMEOUT", None]
        assert desk.notes == ["a", "b"]

    @pytest.mark.parametrize("entry", ["sync", "async"])
    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (DeadlineExceededError("late"), "DEADLINE_EXCEEDED"),
            (PromptEvaluationError("stop"), "EVALUATION_STOPPED"),
            (VisibilityExpansionRequired(section_keys=["a"]), "VISIBILITY_EXPANSION"),
            (KeyboardInterrupt(), "INTERRUPTED"),
            (SystemExit(), "INTERRUPTED"),
            (asyncio.CancelledError(), "INTERRUPTED"),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
    )
    @pytest.mark.parametrize("concurrent", [False, True])
    def test_what_raises_through_ends_the_turn(
        self, error: BaseException, code: str, entry: str, concurrent: bool
    ) -> None:
        """The calls before it are kept, those after it are not, and subscribers hear of all."""

        async def raises(params: Params, *, context: ToolContext) -> ToolResult[None]:
            context.session.dispatch(Note("raising"))
            raise error

        def raises_in_thread(params: Params, *, context: ToolContext) -> ToolResult[None]:
            context.session.dispatch(Note("raising"))
            raise error

        handler = raises_in_thread if concurrent else raises
        desk = Desk([tool("note", note), tool("raises", handler, concurrent=concurrent or None)])
        calls = [call("note", "a"), call("raises"), call("note", "b"), call("note", "c")]

        with pytest.raises(type(error)):
            if entry == "sync":
                desk.turn(*calls)
            else:
                asyncio.run(desk.aturn(*calls))

        assert desk.notes == ["a"]
        by_place = {record.place: record for record in desk.records}
        assert by_place[0].success
        assert by_place[1].result.failure is not None
        assert by_place[1].result.failure.code == code
        assert all(not by_place[place].success for place in by_place if place > 1)
        assert [record.place for record in desk.heard] == sorted(by_place)
        # And the session goes on.
        assert execute_tool(call("note", "d"), session=desk.session).success

    def test_a_deadline_that_has_passed_ends_the_turn_before_it_begins(self) -> None:
        from weakincentives import Deadline
        from weakincentives.testing import FakeClock

        clock = FakeClock(1000)
        deadline = Deadline.after(5, clock=clock)
        clock.advance(6)
        desk = Desk([tool("note", note)])
        context = ToolContext(session=desk.session, prompt=desk.prompt, deadline=deadline)

        with pytest.raises(DeadlineExceededError):
            execute_tools([call("note", "a"), call("note", "b")], context=context)

        assert desk.notes == []
        assert desk.records[0].result.failure is not None
        assert desk.records[0].result.failure.code == "DEADLINE_EXCEEDED"

    def test_cancelling_the_turn_keeps_what_has_committed_and_nothing_else(self) -> None:
        cleaned: list[str] = []

        async def hang(params: Params, *, context: ToolContext) -> ToolResult[None]:
            context.session.dispatch(Note(params.text))
            context.filesystem.write("half", "x")
            try:
                await asyncio.sleep(60)
            finally:
                cleaned.append(params.text)
            return done()

        desk = Desk([tool("note", note), tool("hang", hang)])

        async def cancelled() -> None:
            turn = asyncio.ensure_future(
                desk.aturn(
                    call("note", "a"),
                    call("note", "b"),
                    call("hang", "c"),
                    call("note", "d"),
                    call("hang", "e"),
                    max_concurrency=4,
                )
            )
            while desk.notes != ["a", "b"]:
                await asyncio.sleep(0)
            await asyncio.sleep(0.001)
            turn.cancel()
            await turn

        with pytest.raises(asyncio.CancelledError):
            asyncio.run(cancelled())

        assert desk.notes == ["a", "b"]
        assert desk.fs.glob("**/*") == ("x",)
        assert cleaned == ["c"] or sorted(cleaned) == ["c", "e"]
        assert [record.success for record in desk.records][:2] == [True, True]
        assert not any(record.success for record in desk.records[2:])
        assert desk.heard == sorted(desk.records, key=lambda record: record.place or 0)
        assert execute_tool(call("note", "f"), session=desk.session).success


class TestPolicies:
    def files(self) -> Desk:
        async def read_file(params: Params, *, context: ToolContext) -> ToolResult[None]:
            await asyncio.sleep(0)
            return done(context.filesystem.read(params.path))

        async def write_file(params: Params, *, context: ToolContext) -> ToolResult[None]:
            context.filesystem.write(params.path, params.text)
            return done("written")

        return Desk(
            [tool("read_file", read_file, reach="read"), tool("write_file", write_file)],
            [ReadBeforeWritePolicy()],
        )

    def test_reading_and_then_writing_a_file_in_one_turn_is_allowed(self) -> None:
        desk = self.files()

        results = desk.turn(call("read_file"), call("write_file", "new"))

        assert [result.message for result in results] == ["old", "written"]
        assert desk.fs.read("x") == "new"

    def test_writing_and_then_reading_it_is_not(self) -> None:
        desk = self.files()

        results = desk.turn(call("write_file", "new"), call("read_file"))

        assert [result.message for result in results] == [
            "Cannot write to x without reading it first",
            "old",
        ]
        assert desk.fs.read("x") == "old"

    def test_a_quota_holds_inside_one_turn(self) -> None:
        desk = Desk([tool("note", note), tool("fail", fail)], [QuotaPolicy(3)])

        results = desk.turn(
            call("note", "a"), call("fail"), call("note", "b"), call("note", "c"), call("note", "d")
        )

        assert [result.success for result in results] == [True, False, True, False, False]
        assert results[3].message == "Quota exceeded: 3/3 calls used"
        assert desk.notes == ["a", "b"]

    @pytest.mark.parametrize("policy", [QuotaPolicy(3), RateLimitPolicy(3)], ids=["quota", "rate"])
    @pytest.mark.parametrize("together", [True, False], ids=["one turn", "each by itself"])
    def test_no_handler_begins_beyond_a_limit(self, policy: Any, together: bool) -> None:
        """What it reaches outside would be reached although the call is refused."""
        begun: list[str] = []
        most = 0

        async def fetch(params: Params, *, context: ToolContext) -> ToolResult[None]:
            nonlocal most
            begun.append(params.text)
            under_way.append(params.text)
            most = max(most, len(under_way))
            await asyncio.sleep(0.01)
            under_way.remove(params.text)
            return done()

        under_way: list[str] = []
        desk = Desk([tool("fetch", fetch, reach="read")], [policy])
        calls = [call("fetch", text) for text in "abcdefgh"]

        async def each() -> list[ToolResult[Any]]:
            return await asyncio.gather(*(aexecute_tool(c, session=desk.session) for c in calls))

        results = desk.turn(*calls) if together else asyncio.run(each())

        assert sum(result.success for result in results) == len(begun) == 3
        assert not together or most == 3

    def test_an_async_policy_is_asked_on_the_same_view(self) -> None:
        class AtMostTwo:
            name = "at_most_two"

            async def check(
                self, tool: Any, params: Any, *, context: ToolContext
            ) -> PolicyDecision:
                await asyncio.sleep(0)
                enough = len(context.session[Note]) >= 2
                return PolicyDecision.deny("enough") if enough else PolicyDecision.allow()

        desk = Desk([tool("note", note)], [AtMostTwo()])

        results = desk.turn(*(call("note", text) for text in "abcd"))

        assert [result.success for result in results] == [True, True, False, False]


@dataclass
class Counter:
    """Can be snapshotted and restored, but not forked: it is changed in place."""

    value: int = 0

    def snapshot(self) -> int:
        return self.value

    def restore(self, token: int) -> None:
        self.value = token


@dataclass
class Shop:
    """Hides a counter."""

    counter: Counter


class Diary:
    """Nothing that takes part in transactions, and made for one call."""

    made: list[Diary]

    def __init__(self) -> None:
        self.pages: list[str] = []
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class TestResources:
    @pytest.mark.parametrize("built", ["before", "inside"])
    @pytest.mark.parametrize("hidden", [False, True])
    @pytest.mark.parametrize("concurrent", [False, True])
    @pytest.mark.parametrize("failing", [0, 1, 2])
    def test_a_failing_call_takes_nothing_back_that_another_changed_in_place(
        self, built: str, hidden: bool, concurrent: bool, failing: int
    ) -> None:
        crowd = Crowd()

        def add(params: Params, context: ToolContext) -> Counter:
            found = (
                context.resources.get(Shop).counter if hidden else context.resources.get(Counter)
            )
            found.value += int(params.text)
            return found

        async def adds(params: Params, *, context: ToolContext) -> ToolResult[None]:
            await asyncio.sleep(0)
            add(params, context)
            with crowd:
                for _ in range(3):
                    await asyncio.sleep(0)
            if params.path == "fail":
                raise ValueError("no")
            return done()

        def adds_in_thread(params: Params, *, context: ToolContext) -> ToolResult[None]:
            add(params, context)
            with crowd:
                if params.path == "fail":
                    raise ValueError("no")
            return done()

        handler = adds_in_thread if concurrent else adds
        desk = Desk(
            [tool("add", handler, concurrent=concurrent or None)],
            resources={
                Counter: Binding(Counter, lambda r: Counter()),
                Shop: Binding(Shop, lambda r: Shop(r.get(Counter))),
            },
        )
        if built == "before":
            desk.prompt.resources.get(Shop)
        paths = ["fail" if n == failing else "x" for n in range(3)]

        results = desk.turn(*(call("add", str(10**n), path=path) for n, path in enumerate(paths)))

        assert [result.success for result in results] == [path == "x" for path in paths]
        assert desk.prompt.resources.get(Counter).value == 111 - 10**failing
        assert crowd.most == 1
        if built == "before":
            assert {record.attempts for record in desk.records} == {1}

    def test_a_handler_that_swallows_the_refusal_is_taken_again_all_the_same(self) -> None:
        async def stubborn(params: Params, *, context: ToolContext) -> ToolResult[None]:
            try:
                context.resources.get(Counter).value += 1
            except Exception:
                return done("swallowed")
            return done("counted")

        desk = Desk(
            [tool("stubborn", stubborn)],
            resources={Counter: Binding(Counter, lambda r: Counter())},
        )

        results = desk.turn(call("stubborn"), call("stubborn"))

        assert [result.message for result in results] == ["counted", "counted"]
        assert desk.prompt.resources.get(Counter).value == 2

    def test_a_nested_call_that_needs_its_place_has_the_outer_one_taken_again(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        def count(params: Params, *, context: ToolContext) -> ToolResult[None]:
            context.resources.get(Counter).value += 1
            return done("counted")

        inner = tool("inner", count)

        async def outer(params: Params, *, context: ToolContext) -> ToolResult[None]:
            await asyncio.sleep(0)
            return done(inner(Params(), context=context).message)

        desk = Desk(
            [tool("outer", outer)], resources={Counter: Binding(Counter, lambda r: Counter())}
        )

        results = desk.turn(call("outer"), call("outer"))

        assert [result.message for result in results] == ["counted", "counted"]
        assert desk.prompt.resources.get(Counter).value == 2
        assert [record.tool_name for record in desk.records] == ["inner", "outer"] * 2
        assert desk.heard == list(desk.records)
        assert caplog.text == ""

    def test_each_call_and_each_attempt_has_its_own_and_it_is_closed(self) -> None:
        made: list[Diary] = []

        def make(_: object) -> Diary:
            made.append(Diary())
            return made[-1]

        async def write(params: Params, *, context: ToolContext) -> ToolResult[None]:
            diary = context.resources.get(Diary)
            diary.pages.append(params.text)
            await bump(params, context=context)
            assert context.resources.get(Diary) is diary
            return done()

        desk = Desk(
            [tool("write", write)],
            resources={Diary: Binding(Diary, make, scope=Scope.TOOL_CALL)},
        )

        desk.turn(*(call("write", text) for text in "abc"))

        assert [record.attempts for record in desk.records] == [1, 2, 2]
        assert sorted(diary.pages for diary in made) == [["a"], ["b"], ["b"], ["c"], ["c"]]
        assert [diary.closed for diary in made] == [1] * 5


class TestSubscribers:
    def test_they_hear_once_and_afterwards_and_may_call_tools(self) -> None:
        desk = Desk([tool("bump", bump), tool("note", note)])
        totals: list[int] = []

        def count(event: ToolInvoked) -> None:
            if event.tool_name == "bump":
                totals.append(desk.total)
                execute_tool(call("note", str(event.place)), session=desk.session)

        desk.session.dispatcher.subscribe(ToolInvoked, count)

        desk.turn(*[call("bump")] * 4)

        assert totals == [4, 4, 4, 4]
        assert desk.notes == ["0", "1", "2", "3"]

    def test_what_is_nested_in_a_call_that_is_taken_again_is_heard_once(self) -> None:
        inner = tool("inner", note)

        async def outer(params: Params, *, context: ToolContext) -> ToolResult[None]:
            await inner.acall(Params(params.text), context=context)
            return await bump(params, context=context)

        desk = Desk([tool("outer", outer)])

        desk.turn(call("outer", "a"), call("outer", "b"))

        assert [record.attempts for record in desk.records] == [1, 1, 1, 2]
        assert [record.tool_name for record in desk.heard] == ["inner", "outer"] * 2
        assert desk.heard == list(desk.records)


class TestNested:
    @pytest.mark.parametrize("kind", ["sync", "async", "thread", "blocking"])
    @pytest.mark.parametrize("keep", [True, False])
    def test_a_handler_runs_a_turn_of_its_own(self, kind: str, keep: bool) -> None:
        calls = [call("bump"), call("bump"), call("fail"), call("bump")]

        def end(results: tuple[ToolResult[Any], ...]) -> ToolResult[None]:
            message = str([result.success for result in results])
            return done(message) if keep else ToolResult.error(message)

        async def asynchronous(params: Params, *, context: ToolContext) -> ToolResult[None]:
            return end(await aexecute_tools(calls, context=context))

        async def blocking(params: Params, *, context: ToolContext) -> ToolResult[None]:
            return end(execute_tools(calls, context=context))

        def synchronous(params: Params, *, context: ToolContext) -> ToolResult[None]:
            return end(execute_tools(calls, context=context))

        handlers = {"async": asynchronous, "blocking": blocking}
        handler = handlers.get(kind, synchronous)
        outer = tool("outer", handler, concurrent=kind == "thread" or None)
        desk = Desk([outer, tool("bump", bump), tool("fail", fail)])

        results = desk.turn(call("bump"), call("outer"), call("outer"))

        assert [r.message for r in results[1:]] == ["[True, True, False, True]"] * 2
        assert desk.total == (7 if keep else 1)
        assert desk.notes == []
        names = [record.tool_name for record in desk.records]
        assert names == ["bump", *["bump", "bump", "fail", "bump", "outer"] * 2]
        assert desk.heard == list(desk.records)

    def test_from_inside_a_running_loop(self) -> None:
        desk = Desk([tool("bump", bump)])

        async def main() -> tuple[ToolResult[Any], ...]:
            return desk.turn(*[call("bump")] * 3)

        assert [result.success for result in asyncio.run(main())] == [True] * 3
        assert desk.total == 3

    def test_turns_on_one_session_wait_for_each_other(self) -> None:
        desk = Desk([tool("bump", bump)])

        async def main() -> None:
            turns = [desk.aturn(*[call("bump")] * 5) for _ in range(4)]
            await asyncio.gather(*turns, aexecute_tool(call("bump"), session=desk.session))

        asyncio.run(main())

        assert desk.total == 21
        assert [record.place for record in desk.records].count(0) == 4


class TestThreadsOfAHandler:
    def test_they_work_on_the_view_of_their_call_through_its_context(self) -> None:
        async def spreads(params: Params, *, context: ToolContext) -> ToolResult[None]:
            def work() -> None:
                context.session.dispatch(Note(params.text))
                context.filesystem.write(params.text, "x")

            threads = [threading.Thread(target=work) for _ in range(3)]
            for thread in threads:
                thread.start()
            await asyncio.sleep(0)
            for thread in threads:
                thread.join()
            return done() if params.text != "b" else ToolResult.error("no")

        desk = Desk([tool("spreads", spreads)])

        desk.turn(*(call("spreads", text) for text in "abc"))

        assert desk.notes == ["a"] * 3 + ["c"] * 3
        assert desk.fs.glob("**/*") == ("a", "c", "x")

    def test_one_that_goes_on_after_its_call_changes_nothing(self) -> None:
        go_on, refused = threading.Event(), threading.Event()

        async def leaves(params: Params, *, context: ToolContext) -> ToolResult[None]:
            def late() -> None:
                go_on.wait(120)
                try:
                    context.session.dispatch(Note("late"))
                except ViewClosed:
                    refused.set()

            threading.Thread(target=late, daemon=True).start()
            return done()

        desk = Desk([tool("note", note), tool("leaves", leaves)])

        desk.turn(call("leaves"), call("note", "a"))
        go_on.set()

        assert refused.wait(120)
        assert desk.notes == ["a"]
