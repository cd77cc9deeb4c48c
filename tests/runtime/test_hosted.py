"""Calls for frameworks that keep their own loop: once, admission, denials elsewhere, open calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import weakincentives as wink
from weakincentives.errors import ApprovalNeeded, Suspended, WinkError
from weakincentives.prompt import (
    Approval,
    ApprovalAsked,
    ApprovalPolicy,
    PolicyDecision,
    QuotaPolicy,
)
from weakincentives.runtime import OpenCall, SavedSession, ToolInvoked, open_run
from weakincentives.runtime.calls import runs_of


@dataclass
class Bench:
    """A registry over a directory, and what its tools did."""

    tools: wink.ToolRegistry
    root: Path
    sent: list[str] = field(default_factory=list[str])

    @property
    def records(self) -> tuple[ToolInvoked, ...]:
        return self.tools.session[ToolInvoked].all()


BASH: wink.Tool[Any, Any] = wink.Tool.from_schema(
    "bash",
    "Run a command.",
    {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    None,
    writes="external",
)


@wink.tool(reach="irreversible")
def send(to: str, *, context: wink.ToolContext) -> str:
    """Send a letter."""
    sent: Any = context.config["sent"]
    sent.append(to)
    return f"sent to {to}"


@wink.tool(reach="reversible")
def put(path: str, text: str, *, context: wink.ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, text)
    if text == "bad":
        raise ValueError("bad text")
    return f"wrote {path}"


def bench(root: Path, *policies: Any, session: wink.Session | None = None) -> Bench:
    sent: list[str] = []
    registry = wink.ToolRegistry(
        [send, put],
        workspace=root,
        policies=policies,
        session=session or wink.Session(),
        config={"sent": sent},
    )
    return Bench(registry, root, sent)


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Bench]:
    made = bench(tmp_path)
    with made.tools:
        yield made


# Once


def test_a_call_on_record_returns_its_answer_and_runs_nothing(at: Bench):
    first = at.tools.execute("send", {"to": "ana"}, call_id="1", once=True)
    again = at.tools.execute("send", {"to": "ana"}, call_id="1", once=True)

    assert again.render() == first.render() == "sent to ana"
    assert at.sent == ["ana"]
    assert len(at.records) == 1


def test_failures_and_refusals_are_answers_on_record_too(at: Bench):
    for arguments in ({"path": "a", "text": "bad"}, {"path": 3}):
        first = at.tools.execute("put", arguments, call_id=str(arguments), once=True)
        again = at.tools.execute("put", arguments, call_id=str(arguments), once=True)
        assert not again.success
        assert again.message == first.message
    assert len(at.records) == 2


def test_another_call_of_the_same_id_is_another_call(at: Bench):
    """Some providers count their ids from zero in every request."""
    for _ in range(2):
        assert at.tools.execute("send", {"to": "ana"}, call_id="0", once=True).success
        assert at.tools.execute("send", {"to": "bob"}, call_id="0", once=True).success
        assert at.tools.execute("put", {"path": "a", "text": "1"}, call_id="0", once=True).success

    assert at.sent == ["ana", "bob"]
    assert [record.call_id for record in at.records] == ["0", "0#2", "0#3"]


def test_json_text_and_a_mapping_are_the_same_arguments(at: Bench):
    at.tools.execute("send", '{"to": "ana"}', call_id="1", once=True)
    at.tools.execute("send", {"to": "ana"}, call_id="1", once=True)

    assert at.sent == ["ana"]


def test_without_once_a_repeated_id_of_a_reversible_call_runs_again(at: Bench):
    at.tools.execute("put", {"path": "a", "text": "1"}, call_id="1")
    at.tools.execute("put", {"path": "a", "text": "1"}, call_id="1")

    assert len(at.records) == 2


def test_a_call_that_is_made_twice_at_the_same_time_runs_once(at: Bench):
    async def both() -> list[Any]:
        calls = (
            at.tools.aexecute("send", {"to": "ana"}, call_id="1", once=True) for _ in range(20)
        )
        return await asyncio.gather(*calls)

    assert {result.render() for result in asyncio.run(both())} == {"sent to ana"}
    assert at.sent == ["ana"]


def test_a_concurrent_call_that_is_made_twice_at_the_same_time_runs_once(tmp_path: Path):
    ran: list[int] = []

    @wink.tool(reach="reversible")
    async def count(*, context: wink.ToolContext) -> str:
        """Count."""
        ran.append(1)
        await asyncio.sleep(0)
        return "counted"

    async def both(tools: wink.ToolRegistry) -> None:
        calls = (tools.aexecute("count", call_id="1", once=True) for _ in range(20))
        await asyncio.gather(*calls)

    with wink.ToolRegistry([count], workspace=tmp_path) as tools:
        asyncio.run(both(tools))
        assert len(tools.session[ToolInvoked].all()) == 1
    assert ran == [1]


def test_a_resumed_process_finds_the_calls_on_record(tmp_path: Path):
    for _ in range(2):
        with open_run(tmp_path, "letters", key="thread-1") as run:
            made = bench(tmp_path, session=run.session)
            with made.tools:
                answer = made.tools.execute("send", {"to": "ana"}, call_id="x", once=True)
                assert answer.render() == "sent to ana"
    assert made.sent == []


def test_looking_a_call_up_costs_only_what_was_recorded_since(at: Bench):
    for number in range(300):
        at.tools.execute("put", {"path": "a", "text": str(number)}, call_id=str(number))
        assert at.tools.session.record_of(str(number)) is not None
    assert at.tools.session.record_of("0") is not None
    assert at.tools.session.record_of("nope") is None

    at.tools.session[ToolInvoked].clear()
    assert at.tools.session.record_of("0") is None


# Admission


class No:
    name = "no"

    def check(self, tool: Any, params: Any, *, context: wink.ToolContext) -> PolicyDecision:
        return PolicyDecision.deny("not today")


def test_a_call_that_may_run_is_ready_and_nothing_is_recorded(at: Bench):
    assert at.tools.admit("send", {"to": "ana"}).state == "ready"
    assert (at.sent, at.records) == ([], ())


def test_admission_does_not_start_a_call_that_reaches_outside(at: Bench):
    at.tools.admit("send", {"to": "ana"}, call_id="1")

    assert at.tools.execute("send", {"to": "ana"}, call_id="1").success


def test_a_refused_call_has_its_answer_and_is_recorded_once(tmp_path: Path):
    with bench(tmp_path, No()).tools as tools:
        admission = tools.admit("send", {"to": "ana"}, call_id="1")

        assert admission.state == "refused"
        assert admission.result is not None
        assert admission.result.message == "not today"
        again = tools.execute("send", {"to": "ana"}, call_id="1", once=True)
        assert again.message == "not today"
        assert [r.denied_by for r in tools.session[ToolInvoked].all()] == ["no"]


def test_unknown_tools_and_bad_arguments_are_refused(at: Bench):
    assert at.tools.admit("sned").state == "refused"
    bad = at.tools.admit("send", {"to": 3, "from": 4})
    assert bad.state == "refused"
    assert bad.result is not None
    assert '"to"' in bad.result.message
    assert '"from"' in bad.result.message


def test_all_other_policies_come_before_a_person(tmp_path: Path):
    with bench(tmp_path, ApprovalPolicy(), No()).tools as tools:
        assert tools.admit("send", {"to": "ana"}).state == "refused"


def test_admission_counts_nothing(tmp_path: Path):
    with bench(tmp_path, QuotaPolicy(1)).tools as tools:
        for _ in range(3):
            assert tools.admit("send", {"to": "ana"}).state == "ready"
        assert tools.execute("send", {"to": "ana"}).success
        assert tools.admit("send", {"to": "ana"}).state == "refused"


def test_a_call_on_record_is_ready_without_a_question(tmp_path: Path):
    with bench(tmp_path, ApprovalPolicy()).tools as tools:
        tools.execute("send", {"to": "a"}, call_id="1", approval=Approval(True), once=True)

        assert tools.admit("send", {"to": "a"}, call_id="1", once=True).state == "ready"
        assert tools.execute("send", {"to": "a"}, call_id="1", once=True).success


# Approval by the caller


def test_a_call_that_needs_approval_is_suspended_and_runs_with_it(tmp_path: Path):
    made = bench(tmp_path, ApprovalPolicy(tools={"send"}))
    with made.tools as tools:
        admission = tools.admit("send", {"to": "ana"}, call_id="1")
        assert admission.state == "needs_approval"
        assert admission.request is not None
        assert admission.request.arguments == {"to": "ana"}
        with pytest.raises(ApprovalNeeded) as needed:
            tools.execute("send", {"to": "ana"}, call_id="1", once=True)
        assert needed.value.request.shows_the_same_as(admission.request)
        assert made.sent == []

        yes = Approval(True, by="eve")
        result = tools.execute("send", {"to": "ana"}, call_id="1", once=True, approval=yes)

        assert result.render() == "sent to ana"
        assert [r.suspended for r in made.records] == [True, True, False]
        assert made.records[-1].notes == ("approval: approved by eve",)


def test_a_no_is_on_record_with_its_person_and_reason(tmp_path: Path):
    made = bench(tmp_path, ApprovalPolicy())
    with made.tools as tools:
        tools.admit("send", {"to": "ana"}, call_id="1")
        no = Approval(False, by="eve", reason="too late")

        result = tools.execute("send", {"to": "ana"}, call_id="1", approval=no)

        assert result.message == "Call to 'send' was not approved by eve: too late"
        assert made.records[-1].denied_by == "approval"
        assert made.sent == []


def test_an_answer_that_no_policy_asked_for_counts(at: Bench):
    """The framework has asked in its own way."""
    yes = at.tools.execute("send", {"to": "ana"}, approval=Approval(True, by="eve"))
    edited = at.tools.execute("send", {"to": "a"}, approval=Approval(True, arguments={"to": "b"}))
    no = at.tools.execute("send", {"to": "c"}, approval=Approval(False, by="eve", reason="no"))

    assert (yes.success, edited.success) == (True, True)
    assert no.message == "Call to 'send' was not approved by eve: no"
    assert at.sent == ["ana", "b"]
    assert at.records[0].notes == ("approval: approved by eve",)
    assert at.records[2].denied_by == "approval"


def test_a_no_counts_where_a_policy_would_not_have_asked(tmp_path: Path):
    policy = ApprovalPolicy(when=lambda tool, params, context: False)
    made = bench(tmp_path, policy)
    with made.tools as tools:
        assert not tools.execute("send", {"to": "ana"}, approval=Approval(False)).success
        assert tools.execute("send", {"to": "bob"}, approval=Approval(True)).success
    assert made.sent == ["bob"]


def test_edited_arguments_are_run_and_told(tmp_path: Path):
    made = bench(tmp_path, ApprovalPolicy())
    with made.tools as tools:
        edited = Approval(True, arguments={"to": "bob"})
        for _ in range(2):
            result = tools.execute("send", {"to": "a"}, call_id="1", once=True, approval=edited)
        assert made.sent == ["bob"]
        assert "edited" in result.message


def test_an_approval_is_for_what_was_shown(tmp_path: Path):
    """A file that changed between the question and the answer makes it a no."""
    from weakincentives.contrib.tools import file_tools

    (tmp_path / "a.txt").write_text("one\n")
    change = {"path": "a.txt", "content": "three\n", "overwrite": True}
    policy = ApprovalPolicy(tools={"write_file"})
    with wink.ToolRegistry(file_tools(), workspace=tmp_path, policies=[policy]) as tools:
        assert tools.admit("write_file", change, call_id="1").state == "needs_approval"
        (tmp_path / "a.txt").write_text("two\n")

        result = tools.execute("write_file", change, call_id="1", approval=Approval(True))

        assert "has changed since" in result.message
        assert (tmp_path / "a.txt").read_text() == "two\n"


def test_an_approval_answers_one_policy_and_another_asks_for_itself(tmp_path: Path):
    made = bench(tmp_path, ApprovalPolicy(name="first"), ApprovalPolicy(name="second"))
    with made.tools as tools:
        names: list[str] = []
        approval = None
        for _ in range(2):
            with pytest.raises(ApprovalNeeded) as needed:
                tools.execute("send", {"to": "ana"}, call_id="1", approval=approval)
            names.append(needed.value.request.policy_name)
            approval = Approval(True)

        assert tools.execute("send", {"to": "ana"}, call_id="1", approval=approval).success
        assert names == ["first", "second"]


def test_an_approval_is_not_one_for_nested_calls(tmp_path: Path):
    made = bench(tmp_path, ApprovalPolicy())

    @wink.tool()
    def outer(*, context: wink.ToolContext) -> str:
        """Send through another tool."""
        return made.tools.execute("send", {"to": "ana"}, context).message

    with made.tools as tools, pytest.raises(ApprovalNeeded) as needed:
        tools.execute(outer, approval=Approval(True))
    assert needed.value.request.tool_name == "send"
    assert made.sent == []


def test_an_answer_is_not_one_for_a_later_call_of_the_same_id(tmp_path: Path):
    made = bench(tmp_path, ApprovalPolicy())
    with made.tools as tools:
        put = {"path": "a", "text": "1"}
        with pytest.raises(ApprovalNeeded):
            tools.execute("put", put, call_id="1")
        assert tools.execute("put", put, call_id="1", approval=Approval(True)).success
        with pytest.raises(ApprovalNeeded):
            tools.execute("put", put, call_id="1")


def test_a_question_survives_a_restart(tmp_path: Path):
    for attempt in range(2):
        with open_run(tmp_path, key="k") as run:
            made = bench(tmp_path, ApprovalPolicy(), session=run.session)
            with made.tools as tools:
                if attempt == 0:
                    assert tools.admit("send", {"to": "ana"}, call_id="1").state != "ready"
                else:
                    assert len(tools.session[ApprovalAsked].all()) == 1
                    yes = Approval(True, by="eve")
                    assert tools.execute("send", {"to": "ana"}, call_id="1", approval=yes).success
    assert made.sent == ["ana"]


# Denials made elsewhere


def test_a_denial_made_elsewhere_is_recorded_and_runs_nothing(at: Bench):
    result = at.tools.refuse("send", {"to": "ana"}, "not now", by="eve", call_id="1")

    assert result.message == "Call to 'send' was not approved by eve: not now"
    (record,) = at.records
    assert (record.denied_by, record.success, record.ran) == ("eve", False, False)
    again = at.tools.execute("send", {"to": "ana"}, call_id="1", once=True)
    assert again.message == result.message
    assert at.sent == []


def test_a_denial_that_is_reported_twice_is_recorded_once(at: Bench):
    for _ in range(2):
        at.tools.refuse("send", {"to": "ana"}, "no", call_id="1")

    assert len(at.records) == 1


def test_a_denial_of_an_unknown_tool_or_bad_arguments_is_recorded(at: Bench):
    assert not at.tools.refuse("nope", {"x": 1}, "no").success
    assert not at.tools.refuse("send", {"x": 1}, "no").success
    assert [record.params for record in at.records] == [{"x": 1}, {"x": 1}]


# A tool that is not registered


def test_a_tool_that_is_not_registered_runs_under_the_policies(tmp_path: Path):
    @wink.tool()
    def extra() -> str:
        """Do more."""
        return "more"

    with bench(tmp_path).tools as tools:
        assert tools.execute(extra).render() == "more"
        assert "extra" not in tools
    with bench(tmp_path, No()).tools as tools:
        assert tools.execute(extra).message == "not today"


# Open-ended calls


def test_what_is_done_in_the_block_is_committed(at: Bench):
    with at.tools.begin(BASH, {"command": "touch a"}, call_id="1") as call:
        (at.root / "a").write_text("1")
        call.ok("done")

    assert call.result is not None
    assert call.result.render() == "done"
    assert [each.call_id for each in at.tools.workspace.history()] == ["1"]
    at.tools.workspace.undo("1")
    assert not (at.root / "a").exists()


@pytest.mark.parametrize("how", ["fail", "error", "leave", "raise"])
def test_what_is_done_in_the_block_is_rolled_back(at: Bench, how: str):
    (at.root / "a").write_text("before")
    try:
        with at.tools.begin(BASH, {"command": "x"}) as call:
            (at.root / "a").write_text("after")
            if how == "fail":
                call.fail("it did not work")
            elif how == "error":
                call.fail(ValueError("it did not work"))
            elif how == "raise":
                raise ValueError("it did not work")
    except ValueError:
        assert how == "raise"

    assert (at.root / "a").read_text() == "before"
    assert call.result is not None
    assert not call.result.success
    assert ("it did not work" in call.result.message) == (how != "leave")
    assert len(at.records) == 1


def test_a_refused_call_has_its_result_when_the_block_begins(tmp_path: Path):
    with bench(tmp_path, No()).tools as tools:
        with tools.begin(BASH, {"command": "x"}) as call:
            assert call.result is not None
            assert call.result.message == "not today"
        with tools.begin(BASH, {}) as call:
            assert call.result is not None
            assert "command" in call.result.message
        assert len(tools.session[ToolInvoked].all()) == 2


def test_a_call_on_record_has_its_result_when_the_block_begins(at: Bench):
    for expected in (None, "done"):
        with at.tools.begin(BASH, {"command": "x"}, call_id="1", once=True) as call:
            assert (call.result and call.result.render()) == expected
            call.ok("done")
    assert len(at.records) == 1


def test_a_call_that_needs_approval_does_not_begin_without_it(tmp_path: Path):
    with bench(tmp_path, ApprovalPolicy()).tools as tools:
        with pytest.raises(ApprovalNeeded), tools.begin(BASH, {"command": "x"}, call_id="1"):
            pytest.fail("the block began")
        with tools.begin(BASH, {"command": "x"}, call_id="1", approval=Approval(True)) as call:
            call.ok()
        assert tools.session[ToolInvoked].all()[-1].success


def test_calls_with_its_context_are_nested_in_it(at: Bench):
    with at.tools.begin(BASH, {"command": "x"}, call_id="1") as call:
        at.tools.execute("put", {"path": "a", "text": "1"}, call.context)
        call.fail("no")

    assert not (at.root / "a").exists()
    assert [record.nested_in for record in at.records] == ["1", ""]


def test_an_open_call_and_others_run_one_after_the_other(at: Bench):
    order: list[str] = []

    async def other() -> None:
        await at.tools.aexecute("put", {"path": "b", "text": "1"})
        order.append("other")

    async def main() -> None:
        async with at.tools.begin(BASH, {"command": "x"}) as call:
            task = asyncio.create_task(other())
            for _ in range(50):
                await asyncio.sleep(0)
            order.append("open")
            call.ok()
        await task

    asyncio.run(main())
    assert order == ["open", "other"]


def test_cancelling_the_block_aborts_the_call(at: Bench):
    async def main() -> OpenCall:
        opened = at.tools.begin(BASH, {"command": "x"}, call_id="1")
        inside = asyncio.Event()

        async def work() -> None:
            async with opened:
                (at.root / "a").write_text("1")
                inside.set()
                await asyncio.sleep(1000)

        task = asyncio.create_task(work())
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return opened

    call = asyncio.run(main())

    assert call.result is not None
    assert not call.result.success
    assert not (at.root / "a").exists()
    assert at.tools.execute("send", {"to": "ana"}).success  # nothing is locked


def test_cancelling_while_another_call_is_open_leaves_nothing_behind(at: Bench):
    async def main() -> None:
        async with at.tools.begin(BASH, {"command": "x"}) as first:
            waiting = asyncio.create_task(at.tools.begin(BASH, {"command": "y"}).start())
            await asyncio.sleep(0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            first.ok()
        assert (await at.tools.aexecute("send", {"to": "ana"})).success

    asyncio.run(main())


def test_a_framework_that_suspends_in_the_block_is_recorded_so(at: Bench):
    class Interrupt(Exception):
        pass

    Suspended.register(Interrupt)
    with pytest.raises(Interrupt), at.tools.begin(BASH, {"command": "x"}):
        (at.root / "a").write_text("1")
        raise Interrupt

    assert not (at.root / "a").exists()
    assert at.records[-1].suspended


def test_an_answer_may_come_from_another_thread(at: Bench):
    with at.tools.begin(BASH, {"command": "x"}) as call:
        thread = threading.Thread(target=call.ok, args=("done",))
        thread.start()
        thread.join()

    assert call.result is not None
    assert call.result.success


def test_hooks_that_share_no_block_start_and_end_a_call(at: Bench):
    async def main() -> None:
        call = at.tools.begin(BASH, {"command": "x"})
        with pytest.raises(WinkError, match="has not begun"):
            await call.end()
        await call.start()
        call.ok("done")
        assert (await call.end()).render() == "done"
        assert (await call.end()).render() == "done"
        with pytest.raises(WinkError, match="has begun already"):
            await call.start()

    asyncio.run(main())


def test_a_timeout_ends_an_open_call_and_rolls_it_back(at: Bench):
    slow = BASH.replace(timeout=0.05)

    async def main() -> OpenCall:
        async with at.tools.begin(slow, {"command": "x"}) as call:
            (at.root / "a").write_text("1")
            for _ in range(500):
                await asyncio.sleep(0.01)
                if not (at.root / "a").exists():
                    break
            call.ok("too late")
        return call

    call = asyncio.run(main())
    assert call.result is not None
    assert "timed out" in call.result.message


# Runs


def test_a_run_is_shown_by_its_title(tmp_path: Path):
    with open_run(tmp_path, "Nightly cleanup") as run:
        made = bench(tmp_path, session=run.session)
        with made.tools:
            made.tools.execute("send", {"to": "ana"})

    (found,) = runs_of(tmp_path)
    assert found.title == "Nightly cleanup"
    assert [call.tool for call in found.calls()] == ["send"]


def test_runs_without_a_key_are_new_and_with_a_key_continue(tmp_path: Path):
    ids: list[str] = []
    for key in ("", "", "a", "a", "b"):
        with open_run(tmp_path, key=key) as run:
            ids.append(run.session.session_id)

    assert len(set(ids)) == 4
    assert ids[2] == ids[3]


def test_a_run_that_is_open_cannot_be_opened_again(tmp_path: Path):
    from weakincentives.errors import SessionInUse

    with open_run(tmp_path, key="a"), pytest.raises(SessionInUse):
        open_run(tmp_path, key="a")


def test_a_run_of_another_user_is_not_continued(tmp_path: Path):
    """A planted file does not carry our seal."""
    from weakincentives.errors import SnapshotError

    with open_run(tmp_path, key="a") as run:
        path = run.path
    path.write_bytes(b'{"wink_session": 2, "about": {"key": "a"}}\n')

    with pytest.raises(SnapshotError, match="seal"):
        open_run(tmp_path, key="a")


def test_calls_that_a_kill_left_unrecorded_are_redone_when_the_run_continues(tmp_path: Path):
    """The files are committed, with what the session needs, before the session is saved."""
    with open_run(tmp_path, key="a") as run:
        mark, length = run.mark, run.path.stat().st_size
        made = bench(tmp_path, session=run.session)
        with made.tools as tools:
            tools.execute("put", {"path": "a", "text": "1"}, call_id=f"{mark}:1")
            tools.execute("send", {"to": "ana"}, call_id=f"{mark}:2")
        path = run.path
    with path.open("rb+") as file:
        file.truncate(length)  # as if the kill had come before these were saved

    with open_run(tmp_path, key="a") as run:
        again = bench(tmp_path, session=run.session)
        with again.tools as tools:
            assert isinstance(run, SavedSession)
            assert run.recover(tools.workspace) == ()
            assert (tmp_path / "a").read_text() == "1"
            sent = tools.execute("send", {"to": "ana"}, call_id=f"{mark}:2", once=True)
            put = tools.execute("put", {"path": "a", "text": "1"}, call_id=f"{mark}:1", once=True)
    assert sent.render() == "sent to ana"
    assert again.sent == []
    assert put.success
    assert (tmp_path / "a").read_text() == "1"


def test_an_interrupted_call_is_made_again(tmp_path: Path):
    """Its caller was never answered; one that reached outside is in the ledger."""
    runs: list[int] = []

    @wink.tool(reach="reversible")
    async def slow(*, context: wink.ToolContext) -> str:
        """Work, at first for long."""
        runs.append(1)
        if len(runs) == 1:
            await asyncio.sleep(1000)
        return "done"

    async def main(tools: wink.ToolRegistry) -> None:
        task = asyncio.create_task(tools.aexecute("slow", call_id="1", once=True))
        while not runs:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(2):
            assert (await tools.aexecute("slow", call_id="1", once=True)).render() == "done"

    with wink.ToolRegistry([slow], workspace=tmp_path) as tools:
        asyncio.run(main(tools))
    assert len(runs) == 2


def test_a_run_continues_after_a_tool_has_changed(tmp_path: Path):
    """Its records of that tool have plain values, and still count."""

    def begin(answer: str) -> wink.ToolRegistry:
        @wink.tool(reach="reversible")
        def greet(name: str) -> str:
            """Greet."""
            return f"{answer} {name}"

        return wink.ToolRegistry([greet], workspace=tmp_path, session=run.session)

    for answer in ("Hello", "Good day"):
        # The type of the parameters is defined in no module: it is unknown in the next process.
        with open_run(tmp_path, key="a") as run, begin(answer) as tools:
            first = tools.execute("greet", {"name": "ana"}, call_id="1", once=True)
            assert first.render() == "Hello ana"
            assert tools.execute("greet", {"name": "bob"}, call_id=answer, once=True).success
    assert len(run.session[ToolInvoked].all()) == 3
    assert run.session[ToolInvoked].all()[0].params == {"name": "ana"}
