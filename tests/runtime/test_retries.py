"""Retries: each try starts from the state before the call; what was asked is not asked again."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_world import AddStep, Noted, Plan, Step, World, changing_everything, make_tool, raising

from weakincentives.core.deadlines import Deadline
from weakincentives.errors import ToolDefinitionError, ViewClosed
from weakincentives.prompt import (
    Effect,
    PolicyDecision,
    QuotaPolicy,
    Tool,
    ToolContext,
    ToolError,
    ToolResult,
)
from weakincentives.retry import (
    FixedBackoff,
    LinearBackoff,
    NoBackoff,
    RetryPolicies,
    RetryPolicy,
)
from weakincentives.runtime import Session, ToolCall, aexecute_tool, execute_tool, execute_tools
from weakincentives.testing import FakeClock

TWICE_MORE = RetryPolicy(max_retries=2, backoff=NoBackoff())


def failing(times: int, error: BaseException | ToolResult[Any]) -> Any:
    """A handler's body that fails so often, and then succeeds."""
    left = [times]

    def body(params: Step, context: ToolContext) -> Any:
        if left[0]:
            left[0] -= 1
            if isinstance(error, BaseException):
                raise error
            return error
        return None

    return body


def world(body: Any, retry: RetryPolicy | None, **options: Any) -> World:
    options.setdefault("reach", "reversible")
    return World(
        [make_tool("work", body, retry=retry, **options)], session=Session(clock=FakeClock())
    )


def test_a_transient_failure_is_tried_again_from_the_state_before_the_call():
    w = world(failing(2, ConnectionError("reset")), TWICE_MORE)

    result = w.call("work")

    assert result.success
    assert result.metadata.attempts == 3
    assert w.state() == (Plan(("a",)), {"a.txt": "written", "journal.txt": "a\n"}, 1)


def test_the_log_keeps_what_every_attempt_noted_and_the_call_leaves_one_record():
    w = world(failing(1, ConnectionError("reset")), TWICE_MORE)

    w.call("work")

    assert w.session[Noted].all() == (Noted("a"), Noted("a"))
    assert len(w.records) == 1


def test_when_all_attempts_fail_the_last_failure_is_the_answer_and_nothing_is_left():
    w = world(raising(ConnectionError("reset")), TWICE_MORE)

    result = w.call("work")

    assert not result.success
    assert result.failure is not None
    assert result.failure.code == "NETWORK"
    assert result.metadata.attempts == 3
    assert w.state() == (Plan(), {}, 0)


def test_without_a_last_error_the_answer_is_that_the_retries_are_exhausted():
    """The Protocol: ``error: lastError || { code: 'MAX_RETRIES_EXCEEDED', ... }``."""
    w = world(failing(9, ToolResult("", success=False)), TWICE_MORE)

    result = w.call("work")

    assert result.metadata.attempts == 3
    assert result.failure == ToolError(
        "MAX_RETRIES_EXCEEDED", "Exceeded maximum retries (2)", recoverable=False
    )
    assert result.message == "Exceeded maximum retries (2)"
    assert w.state() == (Plan(), {}, 0)


def test_the_words_of_a_handler_stay_when_its_retries_are_exhausted():
    w = world(failing(9, ToolResult("the disk is busy", success=False)), TWICE_MORE)

    result = w.call("work")

    assert result.message == "the disk is busy"
    assert result.failure is not None
    assert result.failure.code == "MAX_RETRIES_EXCEEDED"


def test_a_failure_that_another_try_cannot_mend_is_not_tried_again():
    w = world(raising(ZeroDivisionError("bug")), TWICE_MORE)

    assert w.call("work").metadata.attempts == 1


def test_a_handlers_own_failure_is_tried_again_when_its_code_is_listed():
    policy = RetryPolicy(max_retries=3, retryable_errors=frozenset({"BUSY"}))
    w = world(failing(1, ToolResult.error("later", code="BUSY")), policy)

    assert w.call("work").metadata.attempts == 2

    other = world(failing(1, ToolResult.error("never", code="GONE")), policy)
    assert other.call("work").metadata.attempts == 1


def test_the_waits_follow_the_backoff_by_the_clock_of_the_session():
    w = world(
        failing(3, ConnectionError()),
        RetryPolicy(max_retries=3, backoff=LinearBackoff(base_delay=1.0, increment=0.5)),
    )
    before = w.session.clock.time()

    w.call("work")

    assert w.session.clock.time() - before == pytest.approx(1.0 + 1.5 + 2.0)


def test_a_deadline_that_would_pass_in_the_wait_ends_the_tries():
    clock = FakeClock()
    w = World(
        [
            make_tool(
                "work", raising(ConnectionError()), reach="reversible", retry=RetryPolicies.QUICK
            )
        ],
        session=Session(clock=clock),
    )
    context = ToolContext(
        session=w.session, prompt=w.prompt, deadline=Deadline.after(1.5, clock=clock)
    )

    result = execute_tool(ToolCall("work", {"name": "a"}), context=context)

    assert result.metadata.attempts == 2


def test_policies_are_asked_once_and_the_call_counts_once():
    asked: list[str] = []

    class Asked:
        name = "asked"

        def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
            asked.append(tool.name)
            return PolicyDecision.allow()

    w = World(
        [make_tool("work", failing(2, ConnectionError()), reach="reversible", retry=TWICE_MORE)],
        policies=[Asked(), QuotaPolicy(max_calls=2)],
        session=Session(clock=FakeClock()),
    )

    assert w.call("work").success
    assert w.call("work").success
    assert "Quota exceeded: 2/2" in w.call("work").message
    assert asked == ["work"] * 3


def test_an_attempt_that_timed_out_cannot_write_into_the_next_one():
    release, done = threading.Event(), threading.Event()
    attempts: list[int] = []

    async def handler(params: Step, *, context: ToolContext) -> ToolResult[None]:
        attempts.append(len(attempts) + 1)
        changing_everything(params, context)
        if attempts == [1]:
            while not release.is_set():
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.01)
            with pytest.raises(ViewClosed):
                context.session.dispatch(AddStep("late"))
            done.set()
        return ToolResult.ok(None)  # the second one at once: no machine is too slow for that

    work = Tool[Step, None](
        name="work",
        description="Works.",
        handler=handler,
        reach="reversible",
        retry=TWICE_MORE,
        timeout=0.2,
    )
    w = World([work])

    result = w.call("work")
    release.set()
    assert done.wait(120)

    assert result.success
    assert result.metadata.attempts == len(attempts) == 2
    assert w.session[Plan].latest() == Plan(("a",))


def test_a_cancelled_wait_leaves_one_record_and_no_change():
    w = World(
        [make_tool("work", raising(ConnectionError()), reach="reversible", retry=RetryPolicy(
            max_retries=1, backoff=FixedBackoff(delay=600.0)))]
    )  # fmt: skip

    async def cancelled() -> None:
        call = ToolCall("work", {"name": "a"})
        task = asyncio.create_task(aexecute_tool(call, session=w.session))
        while not w.session[Noted].all():
            await asyncio.sleep(0.01)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    assert [record.success for record in w.records] == [False]
    assert w.state() == (Plan(), {}, 0)


def test_the_callers_signal_ends_the_wait():
    w = World(
        [make_tool("work", raising(ConnectionError()), reach="reversible", retry=RetryPolicy(
            max_retries=1, backoff=FixedBackoff(delay=600.0)))]
    )  # fmt: skip
    context = ToolContext(session=w.session, prompt=w.prompt)
    threading.Timer(0.2, context.signal.cancel, ["the user left"]).start()

    result = execute_tool(ToolCall("work", {"name": "a"}), context=context)

    assert "the user left" in result.message
    assert w.state() == (Plan(), {}, 0)


def test_a_key_for_services_is_the_same_in_every_attempt():
    keys: list[str] = []

    def body(params: Step, context: ToolContext) -> None:
        keys.append(context.idempotency_key)
        if len(keys) < 3:
            raise ConnectionError

    w = world(body, TWICE_MORE)
    execute_tool(ToolCall("work", {"name": "a"}, id="call-7"), session=w.session)

    assert keys == ["call-7"] * 3


def test_an_irreversible_tool_cannot_be_retried():
    with pytest.raises(ToolDefinitionError, match="cannot be retried"):
        make_tool("work", raising(ConnectionError()), retry=TWICE_MORE, reach="irreversible")


def test_calls_of_a_turn_retry_at_their_place():
    w = World(
        [
            make_tool("work", failing(1, ConnectionError()), retry=TWICE_MORE,
                      reach="reversible", concurrent=True),
            make_tool("other", lambda p, c: None, reach="reversible", concurrent=True),
        ],
        session=Session(clock=FakeClock()),
    )  # fmt: skip
    calls = [ToolCall("other", {"name": "x"}), ToolCall("work", {"name": "y"})]

    results = execute_tools(calls, session=w.session)

    assert [result.success for result in results] == [True, True]
    assert w.session[Plan].latest() == Plan(("x", "y"))


@given(st.integers(0, 5), st.integers(0, 5))
def test_a_call_is_tried_as_often_as_its_policy_says(fails: int, max_retries: int):
    w = world(failing(fails, ConnectionError()), RetryPolicy(max_retries=max_retries))

    result = w.call("work")

    assert result.metadata.attempts == min(fails, max_retries) + 1
    assert result.success == (fails <= max_retries)
    assert w.state()[2] == int(result.success)


def _failing_effect() -> Effect:
    def fail() -> None:
        raise ConnectionError("the index is away")

    return Effect(description="index it", apply=fail)


@pytest.mark.parametrize("reach", ["reversible", "compensable"])
def test_an_effect_that_fails_after_a_success_is_not_retried(reach: Any):
    """Retry covers the handler: what it did outside must not be done again for an effect's sake."""
    sent: list[str] = []
    taken_back: list[str] = []

    def send(params: Step, context: ToolContext) -> None:
        sent.append(params.name)

    cancel = Effect(
        description="cancel", apply=lambda: None, rollback=lambda: taken_back.append("it")
    )
    w = world(send, TWICE_MORE, reach=reach, effects=[cancel, _failing_effect()])

    result = w.call("work")

    assert not result.success
    assert "the index is away" in result.message
    assert sent == ["a"]
    assert taken_back == ["it"]
    assert result.metadata.attempts == 1
    assert w.state() == (Plan(), {}, 0)


def test_a_policy_that_refuses_a_result_does_not_have_the_handler_run_again():
    class Broken:
        name = "broken"

        def check(self, tool: object, params: object, *, context: ToolContext) -> PolicyDecision:
            return PolicyDecision.allow()

        def on_result(self, *args: object, context: ToolContext) -> None:
            raise ConnectionError("cannot note it")

    sent: list[str] = []
    tool = make_tool(
        "work",
        lambda params, context: sent.append(params.name),
        reach="reversible",
        retry=TWICE_MORE,
    )
    w = World([tool], policies=[Broken()], session=Session(clock=FakeClock()))

    result = w.call("work")

    assert not result.success
    assert sent == ["a"]


def test_a_tool_that_only_reads_must_not_write_in_a_later_attempt_either():
    attempts: list[int] = []

    def handler(params: Step, *, context: ToolContext) -> ToolResult[None]:
        attempts.append(len(attempts))
        if len(attempts) == 1:
            raise ConnectionError("busy")
        context.session.dispatch(AddStep("written"))
        return ToolResult.ok(None)

    looks = Tool[Step, None](
        name="look", description="Looks.", handler=handler, reach="read", retry=TWICE_MORE
    )
    w = World([looks])

    result = w.call("look")

    assert len(attempts) > 1
    assert not result.success
    assert w.state()[0].steps == ()


def test_a_retried_call_that_succeeds_logs_no_error(caplog: pytest.LogCaptureFixture):
    """A failed attempt is a line; its traceback is for a call that fails in the end."""
    w = world(failing(2, ConnectionError("reset")), TWICE_MORE)

    with caplog.at_level("INFO"):
        assert w.call("work").success

    logged = [(each.levelname, each.exc_info) for each in caplog.records]
    assert logged == [("INFO", None)] * 2
    assert all("NETWORK" in each.message and "reset" in each.message for each in caplog.records)


@pytest.mark.parametrize("error", [ConnectionError("reset"), TypeError("no number"), KeyError("x")])
def test_a_call_that_fails_in_the_end_logs_one_traceback(
    caplog: pytest.LogCaptureFixture, error: Exception
):
    w = world(raising(error), TWICE_MORE)

    with caplog.at_level("INFO"):
        assert not w.call("work").success

    errors = [each for each in caplog.records if each.levelname == "ERROR"]
    assert [each.exc_info[1] for each in errors if each.exc_info] == [error]
    assert errors == caplog.records[-1:]


def test_debug_logs_have_the_traceback_of_every_attempt(caplog: pytest.LogCaptureFixture):
    error = ConnectionError("reset")
    w = world(failing(2, error), TWICE_MORE)

    with caplog.at_level("DEBUG"):
        assert w.call("work").success

    assert [each.exc_info[1] for each in caplog.records if each.exc_info] == [error] * 2


def test_a_tool_whose_reach_is_not_stated_cannot_be_retried():
    """It may have reached outside: a second attempt could pay twice."""
    with pytest.raises(ToolDefinitionError, match="state its reach, or leave out retry"):
        make_tool("work", raising(ConnectionError()), retry=TWICE_MORE)
    with pytest.raises(ToolDefinitionError, match="state its reach"):
        make_tool("work", raising(ConnectionError()), reach="read", retry=TWICE_MORE).replace(
            reach=None
        )

    make_tool("work", raising(ConnectionError()), retry=RetryPolicies.NONE)
