"""Steps as data: a run that is cut anywhere, and driven again, has the same result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from durable_world import Note, Script, note, prompt_with

from weakincentives.adapters import RunConfig, ScriptedAdapter, calls
from weakincentives.durable.performer import Prepared, SessionSteps
from weakincentives.durable.steps import (
    Call,
    CallResult,
    Finish,
    FinishResult,
    LocalJournal,
    Step,
    StepResult,
    Turn,
    TurnResult,
    WholeRun,
    drive,
    drive_whole,
    from_json,
    to_json,
)
from weakincentives.prompt.approval import Approval, ApprovalRequest
from weakincentives.runtime import SavedSession, Session
from weakincentives.runtime.conversation import Message
from weakincentives.runtime.tool_call import step_by_hand
from weakincentives.session.events import PromptExecuted, ToolInvoked

TURNS = [
    [("note", {"text": "a"}), ("note", {"text": "b"})],
    [("fail", {"text": "x"})],
    [("note", {"text": "c"}), ("nothing", {}), ("note", {"text": "d"})],
]


class Desk:
    """Answers to requests, kept by what was asked."""

    def __init__(self) -> None:
        self.asked: dict[str, ApprovalRequest] = {}
        self.answers: dict[str, Approval] = {}

    def ask(self, request: ApprovalRequest) -> str:
        self.asked[request.digest] = request
        return request.digest

    def answered(self, request: ApprovalRequest) -> Approval | None:
        return self.answers.get(request.digest)


class Cut(BaseException):
    """Stands for the end of the process."""


class CutJournal(LocalJournal):
    """Is cut just before, or just after, the step of a number."""

    def __init__(self, performer: SessionSteps, at: int, *, after: bool) -> None:
        super().__init__(performer)
        self.at, self.after = at, after

    async def step(self, step: Step) -> StepResult:
        if len(self.steps) == self.at and not self.after:
            raise Cut
        result = await super().step(step)
        if len(self.steps) > self.at and not isinstance(step, Finish):
            raise Cut
        return result


def steps_on(saved: SavedSession, desk: Desk | None = None, **given: Any) -> SessionSteps:
    asks = () if desk is None else ("note",)
    prepared = Prepared(adapter=Script(TURNS), prompt=prompt_with(asks), **given)
    return SessionSteps(prepared, saved.session, message="Go.", save=saved.save, approvals=desk)


def seen(session: Session) -> Any:
    """Return what a run has left: the conversation, the records, the state."""
    return (
        [(each.role, each.text, each.call_id, each.tool_calls) for each in session[Message].all()],
        [(e.call_id, e.tool_name, e.success) for e in session[ToolInvoked].all()],
        session[Note].all(),
        [each.stop_reason for each in session[PromptExecuted].all()],
    )


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[SavedSession]:
    with SavedSession.create(tmp_path / "whole.jsonl", Session()) as saved:
        yield saved


@pytest.fixture
def whole(saved: SavedSession) -> Any:
    """What an undisturbed run leaves."""
    assert step_by_hand(drive, "r", LocalJournal(steps_on(saved))) == "done"
    return seen(saved.session)


def test_a_run_in_steps_is_the_run_in_one_piece(whole: Any, tmp_path: Path):
    session = Session()
    Script(TURNS).evaluate(prompt_with(), session, message="Go.")

    assert seen(session) == whole


def test_the_whole_run_as_one_step_is_the_same(whole: Any, tmp_path: Path):
    with SavedSession.create(tmp_path / "one.jsonl", Session()) as saved:
        journal = LocalJournal(steps_on(saved))
        assert step_by_hand(drive_whole, "r", journal) == "done"

        assert seen(saved.session) == whole
        assert [step for step, _ in journal.steps] == [WholeRun("r")]


@pytest.mark.parametrize("after", [False, True])
def test_a_run_that_is_cut_at_any_step_ends_as_if_it_was_not(
    whole: Any, tmp_path: Path, after: bool
):
    for at in range(20):
        path = tmp_path / f"cut{at}.jsonl"
        with SavedSession.create(path, Session()) as saved:
            steps = steps_on(saved)
            try:
                is_whole = step_by_hand(drive, "r", CutJournal(steps, at, after=after)) == "done"
            except Cut:
                is_whole = False
            steps.close()
        with SavedSession.open(path) as saved:
            if not is_whole:
                assert step_by_hand(drive, "r", LocalJournal(steps_on(saved))) == "done"
            assert seen(saved.session)[:3] == whole[:3], at
    assert is_whole, "it was cut at every step"


def test_a_run_that_is_killed_at_any_save_ends_as_if_it_was_not(whole: Any, tmp_path: Path):
    """Every prefix of the log is what a kill leaves."""
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    for count in range(1, len(lines)):
        path = tmp_path / f"{count}.jsonl"
        path.write_bytes(b"".join(lines[:count]))
        with SavedSession.open(path) as saved:
            assert step_by_hand(drive, "r", LocalJournal(steps_on(saved))) == "done"
            messages, records, notes, ends = seen(saved.session)
        assert (messages, records, notes) == whole[:3], count
        assert set(ends) == {"end_turn"}


def test_every_step_may_be_repeated(whole: Any, tmp_path: Path):
    class Twice(LocalJournal):
        async def step(self, step: Step) -> StepResult:
            first = await super().step(step)
            assert await super().step(step) == first
            return first

    with SavedSession.create(tmp_path / "twice.jsonl", Session()) as saved:
        assert step_by_hand(drive, "r", Twice(steps_on(saved))) == "done"
        messages, records, notes, _ = seen(saved.session)

    assert (messages, records, notes) == whole[:3]


def test_what_an_engine_stores_is_small(saved: SavedSession, whole: Any, tmp_path: Path):
    with SavedSession.create(tmp_path / "small.jsonl", Session()) as other:
        journal = LocalJournal(steps_on(other))
        step_by_hand(drive, "r", journal)

    assert all(len(json.dumps(to_json(result))) < 250 for _, result in journal.steps)


@pytest.mark.parametrize(
    "value",
    [
        Turn("r", 3),
        Call("r", "c1", "note"),
        Call("r", "c1", "note", {"text": "a"}),
        Finish("r", "failed", "why"),
        WholeRun("r"),
        TurnResult(3, (("c1", "note"), ("c2", "fail"))),
        TurnResult(4, ended="done"),
        CallResult(success=False, waits_for="x"),
        FinishResult("done", goes_on=True),
    ],
    ids=lambda each: type(each).__name__,
)
def test_steps_and_results_are_json(value: Step | StepResult):
    assert from_json(json.loads(json.dumps(to_json(value)))) == value


def test_a_call_that_needs_a_person_ends_the_sitting_and_the_answer_continues_it(tmp_path: Path):
    path, desk, sittings = tmp_path / "asks.jsonl", Desk(), 0
    with SavedSession.create(path, Session()):
        pass
    ended = "waiting"
    while ended == "waiting":
        sittings += 1
        with SavedSession.open(path) as saved:
            steps = steps_on(saved, desk)
            ended = step_by_hand(drive, "r", LocalJournal(steps))
            steps.close()
            notes = [each.text for each in saved.session[Note].all()]
        for digest, request in desk.asked.items():
            text = request.arguments["text"]
            edited = {"text": "edited"} if text == "b" else None
            answer = Approval(text != "c", "ann", "not now", arguments=edited)
            desk.answers.setdefault(digest, answer)

    assert ended == "done"
    assert sittings == 5, "one for each call that asks, and the last"
    assert notes == ["a", "edited", "d"]


def test_a_journal_may_wait_instead(tmp_path: Path):
    desk = Desk()

    class Answering(LocalJournal):
        async def wait(self, run: str, approval: str) -> bool:
            desk.answers[approval] = Approval(True)
            return True

    with SavedSession.create(tmp_path / "waits.jsonl", Session()) as saved:
        journal = Answering(steps_on(saved, desk))
        assert step_by_hand(drive, "r", journal) == "done"

        assert [each.text for each in saved.session[Note].all()] == ["a", "b", "c", "d"]


def test_limits_hold_over_all_sittings(tmp_path: Path):
    path = tmp_path / "limits.jsonl"
    with SavedSession.create(path, Session()):
        pass
    config = RunConfig(max_turns=2)
    with SavedSession.open(path) as saved:
        steps = steps_on(saved, options={"config": config})
        with pytest.raises(Cut):
            step_by_hand(drive, "r", CutJournal(steps, 3, after=True))
        steps.close()
    with SavedSession.open(path) as saved:
        journal = LocalJournal(steps_on(saved, options={"config": config}))
        assert step_by_hand(drive, "r", journal) == "failed"

        finish = journal.steps[-1][0]
        assert isinstance(finish, Finish)
        assert "2 turns" in finish.detail
        assert saved.session[PromptExecuted].all()[-1].stop_reason == "TurnLimitExceeded"


def test_a_model_that_is_sent_back_too_often_fails_the_run_in_any_sitting(tmp_path: Path):
    from weakincentives.prompt.completion import CompletionResult

    class Never:
        def check(self, context: Any) -> CompletionResult:
            return CompletionResult(False, "more")

    path, taken = tmp_path / "back.jsonl", 0
    with SavedSession.create(path, Session()):
        pass
    ended = None
    while ended is None:
        with SavedSession.open(path) as saved:
            prepared = Prepared(
                adapter=ScriptedAdapter(["Done."]),
                prompt=prompt_with(),
                options={"config": RunConfig(completion=Never())},
            )
            steps = SessionSteps(prepared, saved.session, message="Go.", save=saved.save)
            try:
                ended = step_by_hand(drive, "r", CutJournal(steps, 1, after=True))
            except Cut:
                taken += 1
            steps.close()
            assert taken < 10
            texts = [each.text for each in saved.session[Message].all()]

    assert ended == "failed"
    assert texts.count("Done.") == 4


def test_a_tool_that_opens_sections_is_answered_in_any_sitting(tmp_path: Path):
    from weakincentives.prompt import MarkdownSection, Prompt, PromptTemplate, SectionVisibility

    prompt = Prompt(
        PromptTemplate(
            ns="tests",
            key="open",
            sections=[
                MarkdownSection(
                    title="More",
                    key="more",
                    template="All of it.",
                    summary="A part.",
                    visibility=SectionVisibility.SUMMARY,
                    tools=[note],
                )
            ],
        )
    )
    opens = calls(("open_sections", {"section_keys": ["more"], "reason": "why"}))
    path = tmp_path / "open.jsonl"
    with SavedSession.create(path, Session()):
        pass
    for turns, at in (([opens], 1), (["Done."], 9)):
        with SavedSession.open(path) as saved:
            adapter = ScriptedAdapter(turns)
            steps = SessionSteps(
                Prepared(adapter=adapter, prompt=prompt), saved.session, save=saved.save
            )
            try:
                ended = step_by_hand(drive, "r", CutJournal(steps, at, after=True))
            except Cut:
                ended = None
            steps.close()
            texts = [each.text for each in saved.session[Message].all()]

    assert ended == "done"
    assert any(text.startswith("Opened") for text in texts), texts
    request = adapter.last_request
    assert request is not None
    assert "All of it." in request.prompt.text


def test_without_anyone_to_ask_the_run_fails(tmp_path: Path):
    with SavedSession.create(tmp_path / "none.jsonl", Session()) as saved:
        prepared = Prepared(adapter=Script(TURNS), prompt=prompt_with(["note"]))
        steps = SessionSteps(prepared, saved.session, message="Go.", save=saved.save)

        assert step_by_hand(drive, "r", LocalJournal(steps)) == "failed"


def test_a_run_that_was_cancelled_ends_at_the_next_step(tmp_path: Path):
    with SavedSession.create(tmp_path / "stop.jsonl", Session()) as saved:
        prepared = Prepared(adapter=Script(TURNS), prompt=prompt_with())
        answers = iter([None, None, "cancelled"])
        steps = SessionSteps(
            prepared, saved.session, message="Go.", save=saved.save, check=lambda: next(answers)
        )

        assert step_by_hand(drive, "r", LocalJournal(steps)) == "cancelled"
        assert [each.text for each in saved.session[Note].all()] == ["a"]


def test_an_error_that_is_no_failure_of_the_run_is_raised(tmp_path: Path):
    from weakincentives.errors import DatabaseUnavailable

    def lost() -> None:
        raise DatabaseUnavailable("gone")

    session = Session()
    prepared = Prepared(adapter=Script(TURNS), prompt=prompt_with())
    steps = SessionSteps(prepared, session, message="Go.", save=lost)

    with pytest.raises(DatabaseUnavailable):
        step_by_hand(drive, "r", LocalJournal(steps))


def test_a_bug_fails_the_run_in_words(tmp_path: Path):
    class Broken(ScriptedAdapter):
        async def complete(self, request: Any) -> Any:
            raise RuntimeError("broken")

    with SavedSession.create(tmp_path / "bug.jsonl", Session()) as saved:
        prepared = Prepared(adapter=Broken([]), prompt=prompt_with())
        steps = SessionSteps(prepared, saved.session, message="Go.", save=saved.save)
        journal = LocalJournal(steps)

        assert step_by_hand(drive, "r", journal) == "failed"
        assert journal.steps[-1][0] == Finish("r", "failed", "RuntimeError: broken")
