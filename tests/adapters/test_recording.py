"""Recorded runs: played again they do the same, and where they do not, that is said."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from weakincentives.adapters import (
    Adapter,
    Divergence,
    ModelRequest,
    ScriptedAdapter,
    calls,
    record,
    replay,
    says,
)
from weakincentives.core.call import ToolCall
from weakincentives.errors import ProviderRejected, ReplayDiverged
from weakincentives.filesystem import Filesystem, HostFilesystem, MemoryFilesystem
from weakincentives.prompt import (
    MarkdownSection,
    Prompt,
    PromptTemplate,
    ToolContext,
    ToolResult,
    tool,
)
from weakincentives.runtime import Session, SlicePolicy, ToolInvoked, execute_tool, slice_policy
from weakincentives.session.slices import replace_latest, upsert_by
from weakincentives.testing import FakeClock


@dataclass(frozen=True)
class Note:
    text: str
    at: float = 0.0
    made: datetime | None = None
    call: str = ""


def noting(*, shout: bool = False) -> Any:
    @tool
    def note(text: str, *, context: ToolContext) -> str:
        """Keep a note."""
        context.session.dispatch(Note(text.upper() if shout else text))
        return "Noted"

    return note


def writing(*, suffix: str = "") -> Any:
    @tool
    def write(path: str, content: str, *, context: ToolContext) -> str:
        """Write a file."""
        context.filesystem.write(path, content + suffix)
        return "Written"

    return write


def prompt_of(*tools: Any, files: Filesystem | None = None, text: str = "Do it.") -> Prompt[Any]:
    section = MarkdownSection(title="Task", template=text, tools=tools)
    resources = {Filesystem: MemoryFilesystem() if files is None else files}
    return Prompt(PromptTemplate(sections=[section], resources=resources))


def note_of(text: str) -> tuple[str, dict[str, object]]:
    return "note", {"text": text}


def write_of(path: str, content: str) -> tuple[str, dict[str, object]]:
    return "write", {"path": path, "content": content}


def recorded(path: Path, prompt: Prompt[Any], *turns: Any, **options: Any) -> Path:
    """Record a run of a scripted model; returns where."""
    record(ScriptedAdapter(turns), path).evaluate(prompt, Session(), **options)
    return path


def replayed(path: Path, prompt: Prompt[Any], **options: Any) -> Divergence | None:
    adapter = replay(path)
    adapter.evaluate(prompt, Session(), **options)
    return adapter.divergence


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def test_only_the_owner_can_read_a_recording(path: Path):
    recorded(path, prompt_of(noting()), says("Done."))

    assert stat.S_IMODE(path.stat().st_mode) == 0o600


# The same again


def test_a_replay_gives_the_same_answer_and_the_same_state(path: Path):
    turns = calls(note_of("milk"), text="First"), says("Done é\u2028."), says("never")
    recorded(path, prompt_of(noting()), *turns)
    session, adapter = Session(), replay(path)

    response = adapter.evaluate(prompt_of(noting()), session)

    assert response.text == "Done é\u2028."
    assert session[Note].all() == (Note("milk"),)
    assert adapter.divergence is None


def test_recording_changes_nothing_for_the_run(path: Path):
    turns = calls(note_of("milk")), says("Done.")
    adapter = record(ScriptedAdapter(turns), path)

    response = adapter.evaluate(prompt_of(noting()), Session())

    assert (adapter.name, adapter.needs_loop) == ("scripted", False)
    assert response == ScriptedAdapter(turns).evaluate(prompt_of(noting()), Session())


def test_an_adapter_whose_runs_have_a_state_of_their_own_keeps_it(path: Path):
    ended: list[ScriptedAdapter] = []

    class OfOneRun(ScriptedAdapter):
        async def end_run(self) -> None:
            ended.append(self)

    class Starting(ScriptedAdapter):
        def begin_run(self) -> OfOneRun:
            return OfOneRun(["From a run."])

    adapter = record(Starting([]), path)

    assert adapter.evaluate(prompt_of(), Session()).text == "From a run."
    assert adapter.evaluate(prompt_of(), Session()).text == "From a run."
    assert len(set(ended)) == 2
    assert replay(path).evaluate(prompt_of(), Session()).text == "From a run."


def test_several_runs_in_a_row_go_into_one_recording(path: Path):
    adapter = record(ScriptedAdapter([calls(note_of("a")), says("1"), says("2")]), path)
    adapter.evaluate(prompt_of(noting()), Session())
    adapter.evaluate(prompt_of(), Session(), message="Again.")

    player = replay(path)
    player.evaluate(prompt_of(noting()), Session())
    assert player.evaluate(prompt_of(), Session(), message="Again.").text == "2"
    assert player.divergence is None


def test_a_run_that_is_driven_step_by_step_is_recorded_as_well(path: Path):
    def drive(adapter: Adapter, shout: bool) -> None:
        session, prompt = Session(), prompt_of(noting(shout=shout))
        step = adapter.step(prompt, session)
        result = execute_tool(step.tool_calls[0], session=session)
        adapter.step(prompt, session, tool_results=[result])

    drive(record(ScriptedAdapter([calls(note_of("a")), says("Done.")]), path), False)
    same, other = replay(path), replay(path)
    drive(same, False)
    drive(other, True)

    assert same.divergence is None
    assert other.divergence is not None
    assert (other.divergence.turn, other.divergence.call) == (1, 1)


# Where it differs


def test_the_first_call_that_leaves_another_state_is_named(path: Path):
    turns = calls(note_of("1")), calls(note_of("2"), note_of("three")), says("Done.")
    recorded(path, prompt_of(noting()), *turns)

    found = replayed(path, prompt_of(noting(shout=True)))

    assert found is not None
    assert (found.turn, found.call, found.tool) == (2, 2, "note")
    assert list(found.recorded) == list(found.came) == ["slice Note"]
    assert '"three"' in found.recorded["slice Note"]
    assert '"THREE"' in found.came["slice Note"]
    assert str(found).startswith("turn 2, call 2 (note): slice Note was '")


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_the_first_call_that_leaves_another_file_is_named(path: Path, kind: str, tmp_path: Path):
    folders = (tmp_path / name for name in ("first", "same", "other"))

    def files() -> Filesystem:
        if kind == "memory":
            return MemoryFilesystem({"old.txt": "1"})
        folder = next(folders)
        folder.mkdir()
        (folder / "old.txt").write_text("1")
        return HostFilesystem(folder)

    turns = calls(write_of("a/b.txt", "x")), calls(write_of("old.txt", "y")), says("Done.")

    @tool
    def write(path: str, content: str, *, context: ToolContext) -> str:
        """Write a file."""
        context.filesystem.write(path, "z" if path == "old.txt" else content)
        return "Written"

    recorded(path, prompt_of(writing(), files=files()), *turns)

    assert replayed(path, prompt_of(writing(), files=files())) is None
    found = replayed(path, prompt_of(write, files=files()))
    assert found is not None
    assert (found.turn, found.call, found.tool) == (2, 1, "write")
    assert list(found.recorded) == ["file old.txt"]
    assert found.recorded != found.came


def test_files_that_go_or_do_not_come_differ(path: Path):
    def changing(change: Callable[[Filesystem], None]) -> Prompt[Any]:
        @tool
        def act(*, context: ToolContext) -> str:
            """Change files."""
            change(context.filesystem)
            return "Done"

        return prompt_of(act, files=MemoryFilesystem({"a.txt": "a", "d/e.txt": "e"}))

    recorded(path, changing(lambda files: files.delete("d", recursive=True)), calls("act"), "Ok")

    same = replayed(path, changing(lambda files: files.delete("d", recursive=True)))
    kept = replayed(path, changing(lambda _: None))
    moved = replayed(path, changing(lambda files: files.move("d", "c")))

    assert same is None
    assert kept is not None
    assert moved is not None
    assert kept.recorded == {"file d": "gone", "file d/e.txt": "gone"}
    assert set(kept.came.values()) == {"unchanged"}
    assert list(moved.came) == ["file c", "file c/e.txt"]


def test_another_answer_is_a_difference_even_if_the_state_is_the_same(path: Path):
    def answering(text: str) -> Prompt[Any]:
        @tool
        def ask() -> str:
            """Ask."""
            return text

        return prompt_of(ask)

    recorded(path, answering("x" * 5_000 + "yes"), calls("ask"), "Done.")

    assert replayed(path, answering("x" * 5_000 + "yes")) is None
    found = replayed(path, answering("x" * 5_000 + "no"))
    assert found is not None
    assert (found.call, list(found.recorded)) == (1, ["answer 1"])


def test_a_failure_where_there_was_none_is_a_difference(path: Path):
    @tool
    def note(text: str) -> str:
        """Keep a note."""
        raise ValueError("no more room")

    recorded(path, prompt_of(noting()), calls(note_of("a")), "Done.")

    found = replayed(path, prompt_of(note))

    assert found is not None
    assert set(found.recorded) == {"answer 1", "slice Note"}
    assert found.came["answer 1"].startswith("no more room")
    assert found.came["slice Note"] == "unchanged"


def test_calls_that_ran_together_are_told_apart_by_their_answers(path: Path):
    def looking(third: str, state: str = "") -> Prompt[Any]:
        @tool(reach="reversible")
        async def look(place: int, *, context: ToolContext) -> str:
            """Look at a place."""
            context.session.dispatch(Note(f"{place}{state if place == 2 else ''}"))
            return third if place == 2 else "nothing"

        return prompt_of(look)

    wanted = [("look", {"place": place}) for place in range(3)]
    recorded(path, looking("a cat"), calls(*wanted), "Done.")

    answer = replayed(path, looking("a dog"))
    state = replayed(path, looking("a cat", "!"))

    assert replayed(path, looking("a cat")) is None
    assert answer is not None
    assert state is not None
    assert (answer.turn, answer.call, answer.tool) == (1, 3, "look")
    assert (state.turn, state.call, state.tool) == (1, 1, "look, look, look")


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (prompt_of(noting(), text="Do it now."), "prompt"),
        (prompt_of(noting(), writing()), "tool write"),
        (prompt_of(), "tool note"),
    ],
    ids=["prompt", "tool more", "tool less"],
)
def test_another_request_is_a_difference(path: Path, other: Prompt[Any], name: str):
    recorded(path, prompt_of(noting()), "Done.")

    found = replayed(path, other)

    assert found is not None
    assert (found.turn, found.call, found.tool) == (1, 0, "")
    assert name in found.recorded


def test_of_a_long_text_the_place_is_shown_where_it_differs(path: Path):
    recorded(path, prompt_of(text="All the same. " * 100 + "The end."), "Done.")

    found = replayed(path, prompt_of(text="All the same. " * 100 + "The end. Not yet."))

    assert found is not None
    assert found.recorded["prompt"].startswith("…")
    assert found.recorded["prompt"].endswith("The end.")
    assert found.came["prompt"].endswith("The end. Not yet.")


def test_other_words_of_the_user_are_a_difference(path: Path):
    recorded(path, prompt_of(), "Hello.", message="Greet me.")

    found = replayed(path, prompt_of(), message="Insult me.")

    assert found is not None
    assert found.recorded == {"message 1": "Greet me."}


def test_state_that_was_there_before_is_compared_with_the_first_request(path: Path):
    recorded(path, prompt_of(), "Hello.")
    session, adapter = Session(), replay(path)
    session.dispatch(Note("left over"))

    adapter.evaluate(prompt_of(), session)

    assert adapter.divergence is not None
    assert adapter.divergence.recorded == {"slice Note": "unchanged"}


def test_only_the_first_difference_is_reported(path: Path, caplog: pytest.LogCaptureFixture):
    recorded(path, prompt_of(noting()), calls(note_of("a")), calls(note_of("b")), "Done.")

    with caplog.at_level(logging.WARNING, "weakincentives"):
        found = replayed(path, prompt_of(noting(shout=True)))

    assert found is not None
    assert found.turn == 1
    assert [r.getMessage() for r in caplog.records] == [f"the run differs from run.jsonl: {found}"]


def test_a_strict_replay_ends_the_run_before_the_next_turn(path: Path):
    recorded(path, prompt_of(noting()), calls(note_of("a")), calls(note_of("b")), "Done.")
    session, adapter = Session(), replay(path, strict=True)

    with pytest.raises(ReplayDiverged, match=r"turn 1, call 1 \(note\): slice Note") as caught:
        adapter.evaluate(prompt_of(noting(shout=True)), session)

    assert caught.value.divergence is adapter.divergence
    assert session[Note].all() == (Note("A"),)


def test_calls_that_do_not_come_are_a_difference(path: Path):
    recorded(path, prompt_of(noting()), calls(note_of("a")), "Done.")
    session, adapter = Session(), replay(path)
    adapter.step(prompt_of(noting()), session)

    adapter.step(prompt_of(noting()), session, tool_results=[ToolResult.ok(None, "Noted")])

    assert adapter.divergence is not None
    assert adapter.divergence.recorded == {"calls": "note"}
    assert adapter.divergence.came == {"calls": "none"}


def test_calls_that_were_not_recorded_are_a_difference(path: Path):
    recorded(path, prompt_of(noting()), calls(note_of("a")), "Done.")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if not line.startswith(b'{"calls"')))

    found = replayed(path, prompt_of(noting()))

    assert found is not None
    assert (found.turn, found.call, found.recorded["calls"]) == (1, 1, "none")


def test_a_run_that_goes_on_after_the_end_of_its_recording_says_so(path: Path):
    recorded(path, prompt_of(noting()), calls(note_of("a")), "Done.")
    adapter = replay(path)
    adapter.evaluate(prompt_of(noting()), Session())

    with pytest.raises(ProviderRejected, match=r"run\.jsonl ends after turn 2"):
        adapter.evaluate(prompt_of(noting()), Session())


def test_nothing_is_kept_of_a_run_that_has_ended(path: Path):
    """Nobody listens any more, and a workspace is free to forget its history."""
    session, files = Session(), MemoryFilesystem()
    adapter = record(ScriptedAdapter(["Done."]), path)
    adapter.evaluate(prompt_of(noting(), files=files), session)
    size = path.stat().st_size

    execute_tool(ToolCall("note", {"text": "later"}), session=session)

    assert path.stat().st_size == size


# What does not count


def test_times_and_ids_of_calls_do_not_count(path: Path):
    def stamping() -> Prompt[Any]:
        @tool
        def nested() -> str:
            """Be called by another."""
            return "ok"

        @tool
        def stamp(*, context: ToolContext) -> str:
            """Note when and by whom this was called."""
            inner = nested(context=context).call_id
            now = context.session.clock.time()
            moment = datetime.fromtimestamp(now, UTC)
            context.session.dispatch(Note("now", now, moment, inner))
            return f"Called {inner}"

        return prompt_of(stamp)

    recorded(path, stamping(), calls("stamp"), "Done.")

    assert replayed(path, stamping()) is None


def test_other_numbers_do_count_also_with_a_clock_that_starts_at_zero(path: Path):
    def counting(by: float) -> Prompt[Any]:
        @tool
        def count(*, context: ToolContext) -> str:
            """Count."""
            context.session.dispatch(Note("", by))
            return "ok"

        return prompt_of(count)

    adapter = record(ScriptedAdapter([calls("count"), "Done."]), path)
    adapter.evaluate(counting(1.0), Session(clock=FakeClock(start=0)))
    player = replay(path)
    player.evaluate(counting(2.0), Session(clock=FakeClock(start=0)))

    assert player.divergence is not None


def test_what_is_logged_does_not_count(path: Path):
    @slice_policy(SlicePolicy.LOG)
    @dataclass(frozen=True)
    class Line:
        number: int

    numbers = itertools.count()

    @tool
    def log(*, context: ToolContext) -> str:
        """Write a line."""
        context.session.dispatch(Line(next(numbers)))
        return "ok"

    recorded(path, prompt_of(log), calls("log"), "Done.")

    assert replayed(path, prompt_of(log)) is None


def test_how_a_slice_came_to_hold_the_same_does_not_count(path: Path):
    recorded(path, prompt_of(noting()), calls(note_of("a")), calls(note_of("b")), "Done.")

    @tool
    def note(text: str, *, context: ToolContext) -> str:
        """Keep a note."""
        context.session[Note].seed([*map(_copy, context.session[Note]), Note(text)])
        return "Noted"

    assert replayed(path, prompt_of(note)) is None


def _copy(note: Note) -> Note:
    return Note(note.text)


def _by_call(note: Note) -> str:
    return note.call


REDUCERS: list[Any] = [replace_latest, upsert_by(_by_call)]


@pytest.mark.parametrize("reducer", REDUCERS, ids=["latest", "upsert"])
def test_a_value_that_takes_the_place_of_another_is_seen(path: Path, reducer: Any):
    def run(adapter: Adapter, shout: bool) -> None:
        session = Session()
        session[Note].register(Note, reducer)
        adapter.evaluate(prompt_of(noting(shout=shout)), session)

    run(record(ScriptedAdapter([calls(note_of("1")), calls(note_of("b")), "Done."]), path), False)
    same, other = replay(path), replay(path)
    run(same, False)
    run(other, True)

    assert same.divergence is None
    assert other.divergence is not None
    assert other.divergence.turn == 2


def test_a_value_that_cannot_be_written_down_is_compared_by_its_type(path: Path):
    @dataclass(frozen=True)
    class Odd:
        value: object

    def odd(value: object) -> Prompt[Any]:
        @tool
        def act(*, context: ToolContext) -> str:
            """Act."""
            context.session.dispatch(Odd(value))
            return "ok"

        return prompt_of(act)

    recorded(path, odd(object()), calls("act"), "Done.")

    assert replayed(path, odd(object())) is None


# The file


def test_a_recording_never_takes_the_place_of_a_file(path: Path):
    path.write_text("mine")

    with pytest.raises(FileExistsError):
        record(ScriptedAdapter([]), path)
    assert path.read_text() == "mine"


def test_any_beginning_of_a_recording_can_be_replayed(path: Path, tmp_path: Path):
    recorded(path, prompt_of(noting()), calls(note_of("a")), calls(note_of("b")), "Done.")
    data = path.read_bytes()
    head = data.index(b"\n") + 1
    cut = tmp_path / "cut.jsonl"

    for length in range(head, len(data), len(data) // 12):
        cut.write_bytes(data[:length])
        adapter = replay(cut)
        with pytest.raises(ProviderRejected, match="the model was asked for one more"):
            adapter.evaluate(prompt_of(noting()), Session())
        assert adapter.divergence is None


def test_what_a_killed_run_leaves_can_be_replayed(path: Path):
    program = f"""
import os, signal
from weakincentives.adapters import ScriptedAdapter, calls, record
from weakincentives import MarkdownSection, Prompt, PromptTemplate, Session, tool

@tool
def die(at: int) -> str:
    "Go on, or be killed."
    if at == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"

section = MarkdownSection(title="Task", template="Do it.", tools=[die])
turns = [calls(("die", {{"at": n}})) for n in range(2)]
record(ScriptedAdapter(turns), {str(path)!r}).evaluate(
    Prompt(PromptTemplate(sections=[section])), Session()
)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -signal.SIGKILL

    @tool
    def die(at: int) -> str:
        """Go on, or be killed."""
        return "alive"

    adapter, session = replay(path), Session()
    with pytest.raises(ProviderRejected, match="ends after turn 2"):
        adapter.evaluate(Prompt(PromptTemplate(sections=prompt_of(die).template.sections)), session)

    assert len(session[ToolInvoked]) == 2
    assert adapter.divergence is None


@pytest.mark.parametrize(
    ("content", "says_what"),
    [
        ("", "not a recording"),
        ("hello\n", "not a recording"),
        ("[1]\n", "not a recording"),
        ("{}\n", "not a recording"),
        ('{"wink_recording": 2}\n', "this version cannot read"),
    ],
)
def test_another_file_is_not_taken_for_a_recording(path: Path, content: str, says_what: str):
    path.write_text(content)

    with pytest.raises(ValueError, match=f"run.jsonl is .*{says_what}"):
        replay(path)


def test_a_recording_is_lines_of_plain_json(path: Path):
    recorded(path, prompt_of(noting()), calls(note_of("ü\ud800")), "Done.")

    lines = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]

    assert lines[0] == {"wink_recording": 1, "adapter": "scripted"}
    assert [next(iter(line)) for line in lines[1:]] == ["asked", "calls", "asked"]
    assert lines[1]["turn"]["tool_calls"][0]["params"] == {"text": "ü\ud800"}


def test_parameters_that_are_a_dataclass_are_recorded_as_the_model_would_have_sent_them(
    path: Path,
):
    note = noting()
    recorded(path, prompt_of(note), calls(ToolCall("note", note.params_type(text="a"))), "Done.")

    assert replayed(path, prompt_of(note)) is None


def test_a_request_without_a_session_is_refused(path: Path):
    adapter = record(ScriptedAdapter(["Hello."]), path)
    request = ModelRequest(prompt=prompt_of().render(), messages=[])

    with pytest.raises(ValueError, match="needs the session of its run"):
        asyncio.run(adapter.complete(request))


# Cost


def test_the_cost_of_a_call_follows_what_it_changed(path: Path):
    """A call that changes one value of many has one value and one file written down."""
    files = MemoryFilesystem({f"{n % 100}/{n}.txt": "x" for n in range(5_000)})
    session = Session()
    session[Note].seed([Note(str(n)) for n in range(5_000)])
    turns = calls(note_of("one more")), calls(write_of("7/7.txt", "y")), "Done."

    record(ScriptedAdapter(turns), path).evaluate(
        prompt_of(noting(), writing(), files=files), session
    )

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    seen = [line["seen"] for line in lines if "calls" in line]
    assert seen[0].keys() == {"calls", "answer 1", "slice Note"}
    assert seen[0]["slice Note"].startswith('5001 values; 5000: {"Note": {"at": 0.0')
    assert seen[1].keys() == {"calls", "answer 1", "file 7/7.txt"}
    assert all(len(line) < 3_000 for line in path.read_text().splitlines())


# The example


def test_the_example_shows_where_the_state_first_differs():
    example = Path(__file__).parents[2] / "examples" / "replay_run.py"

    done = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, check=True
    )

    assert "Replayed:  All three are ordered.\nDiffers:   None\n" in done.stdout
    assert "Differs at turn 2, call 1, order:\n  file orders.csv\n" in done.stdout
    assert 'recorded  2 values; 1: {"Ordered": {"cents": 4000, "what": "a lamp"}}' in done.stdout
    assert 'now       2 values; 1: {"Ordered": {"cents": 3600, "what": "a lamp"}}' in done.stdout
    assert "Strictly:  The run differs from its recording: turn 2, call 1 (order)" in done.stdout


def test_a_model_that_a_tool_runs_does_not_end_the_recording_of_the_run(path: Path):
    """What the tool and the calls after it do is compared all the same."""

    def agent(word: str) -> Prompt[Any]:
        @tool(reach="reversible")
        def delegate(*, context: ToolContext) -> str:
            """Let another model do it."""
            inner = ScriptedAdapter([calls(note_of("inner")), "Noted."])
            inner.evaluate(prompt_of(noting()), context.session)
            context.session.dispatch(Note(word))
            return "done"

        return prompt_of(delegate, noting())

    turns = (calls("delegate", note_of("after")), "Done.")
    recorded(path, agent("outer"), *turns)

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["seen"]["calls"] for line in lines if "calls" in line] == ["delegate", "note"]
    assert replayed(path, agent("outer")) is None
    found = replayed(path, agent("another"))
    assert found is not None
    assert (found.turn, found.call, found.tool) == (1, 1, "delegate")


def test_a_recorded_adapter_names_its_model_for_telemetry(path: Path):
    class Named(ScriptedAdapter):
        model = "tiny"

    asked: list[Any] = []

    @tool(reach="read")
    def look(*, context: ToolContext) -> str:
        """Look at who runs this."""
        asked.append(getattr(context.adapter, "model", None))
        return "seen"

    record(Named([calls("look"), "Done."]), path).evaluate(prompt_of(look), Session())

    assert asked == ["tiny"]
