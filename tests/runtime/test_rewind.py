"""Going back in a run: to before a message, or to a call, with files and state of that time."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_world import Note, spoken
from run_world import Work as CallWork
from run_world import opened as opened_run

import weakincentives as wink
from chance import HEAVY
from weakincentives.adapters import Message, ModelRequest, ScriptedAdapter, calls
from weakincentives.core.call import ToolCall
from weakincentives.errors import SnapshotError, UndoRefused
from weakincentives.filesystem import HostFilesystem
from weakincentives.prompt import MarkdownSection, Prompt, PromptTemplate
from weakincentives.runtime import SavedSession, Session, ToolInvoked
from weakincentives.runtime.at import NOT_MADE
from weakincentives.runtime.calls import Run
from weakincentives.runtime.rewind import REWIND, rewind_run


@dataclass(frozen=True)
class Wrote:
    name: str
    text: str


@wink.tool(reach="reversible")
def write(name: str, text: str, *, context: wink.ToolContext) -> str:
    """Write a file, and note it in the session."""
    context.filesystem.write(name, text)
    context.session[Wrote].append(Wrote(name, text))
    return "Written"


class Work(NamedTuple):
    saved: SavedSession
    files: HostFilesystem
    prompt: Prompt[Any]

    def say(self, message: str, *texts: str) -> list[str]:
        """Let the model write these texts; returns what it saw of the conversation before."""
        seen: list[str] = []

        def first(request: ModelRequest) -> Any:
            seen.extend(each.text for each in request.messages if each.role == "user")
            wanted = [("write", {"name": f"{text[:1]}.txt", "text": text}) for text in texts]
            return calls(*wanted) if wanted else "Nothing to do."

        turns = [first, *["Done."] * bool(texts)]
        ScriptedAdapter(turns).evaluate(self.prompt, self.saved.session, message=message)
        return seen

    @property
    def said(self) -> list[str]:
        return [message.text for message in self.saved.user_messages()]

    @property
    def state(self) -> tuple[object, ...]:
        root = self.files.root
        contents = {path.name: path.read_text() for path in sorted(root.iterdir())}
        return contents, self.saved.session[Wrote].all(), self.said


@contextmanager
def opened(place: Path) -> Iterator[Work]:
    """Open the workspace and its session; again after it was closed."""
    root, path = place / "project", place / "run.jsonl"
    root.mkdir(exist_ok=True)
    saving = (
        SavedSession.open(path, types=[Wrote])
        if path.exists()
        else SavedSession.create(path, Session())
    )
    with saving as saved, HostFilesystem(root) as files:
        template = PromptTemplate(
            sections=[MarkdownSection(title="Write", tools=[write])],
            resources={wink.Filesystem: files},
        )
        prompt = Prompt(template)
        with prompt.resources:
            yield Work(saved, files, prompt)


_TEXT = st.sampled_from(["a1", "a2", "b1", "b2", "c1"])
_STEPS = st.lists(
    st.one_of(
        st.lists(_TEXT, max_size=3, unique=True),  # a message, and what the model writes
        st.integers(1, 5),  # rewind to before this message
        st.just("reopen"),
    ),
    max_size=8,
)


@settings(max_examples=20, deadline=None)
@given(_STEPS)
def test_a_rewind_restores_files_state_and_conversation(steps: list[Any]):
    with TemporaryDirectory() as folder:
        remembered: list[tuple[object, ...]] = []  # the state before each message
        rest = iter([*steps, "reopen"])
        done = False
        while not done:
            with opened(Path(folder)) as work:
                for step in rest:
                    if step == "reopen":
                        break
                    if isinstance(step, list):
                        remembered.append(work.state)
                        work.say(f"message {len(remembered)}", *step)
                    elif step <= len(remembered):
                        work.saved.rewind(step, work.files)
                        expected = remembered[step - 1]
                        del remembered[step - 1 :]
                        assert work.state == expected
                else:
                    done = True
        with opened(Path(folder)) as work:
            seen = work.say("last")

        assert seen == [f"message {n}" for n in range(1, len(remembered) + 1)] + ["last"]


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Work]:
    with opened(tmp_path) as work:
        yield work


def test_records_stay_and_the_next_message_continues_from_before(work: Work):
    work.say("one", "a1")
    work.say("two", "a2", "b1")

    work.saved.rewind(2, work.files)

    assert work.say("three", "b2") == ["one", "three"]
    assert [record.success for record in work.saved.session[ToolInvoked]] == [True] * 4
    assert {path.name: path.read_text() for path in work.files.root.iterdir()} == {
        "a.txt": "a1",
        "b.txt": "b2",
    }


def test_a_rewind_to_the_first_message_begins_a_conversation(work: Work):
    work.say("one", "a1")

    work.saved.rewind(1, work.files)

    assert (work.say("two"), work.said) == (["two"], ["two"])
    assert [message.is_first for message in work.saved.session[Message]][-2:] == [True, False]


def test_files_that_someone_has_changed_are_left_alone_and_nothing_is_rewound(work: Work):
    work.say("one", "a1", "b1")
    (work.files.root / "a.txt").write_text("mine")
    before = work.state

    with pytest.raises(UndoRefused):
        work.saved.rewind(1, work.files)
    assert work.state == before

    work.saved.rewind(1, work.files, force=True)
    assert work.state == ({}, (), [])


def test_there_must_be_such_a_message(work: Work):
    work.say("one")

    for number in (0, 2):
        with pytest.raises(IndexError, match=f"no message {number}"):
            work.saved.rewind(number, work.files)


def test_a_rewind_that_was_killed_half_way_is_completed_by_the_next(tmp_path: Path):
    """A kill after the undo of the files leaves the conversation as it was."""
    with opened(tmp_path) as work:
        work.say("one", "a1")
        before = work.state
        work.say("two", "a2", "b1")
        since = [call for message in work.saved.user_messages()[1:] for call in message.calls]
        work.files.undo(*reversed(since))
    with opened(tmp_path) as work:
        assert work.said == ["one", "two"]

        work.saved.rewind(2, work.files)

        assert work.state == before


def test_what_was_undone_before_stays_undone(work: Work):
    work.say("one", "a1")
    work.say("two", "b1")
    work.files.undo(work.files.history()[0].call_id)

    work.saved.rewind(2, work.files)

    assert not any(work.files.root.iterdir())


def test_a_rewound_run_has_ended_as_before(work: Work):
    work.say("one")
    work.say("two")
    work.saved.rewind(2, work.files)

    assert Run(work.saved.path).has_ended


def test_ctrl_c_during_a_rewind_waits_until_it_is_complete(
    work: Work, monkeypatch: pytest.MonkeyPatch
):
    work.say("one", "a1")
    before = work.state
    work.say("two", "a2", "b1")
    undo = HostFilesystem.undo

    def interrupted(files: HostFilesystem, *call_ids: str, force: bool = False) -> tuple[str, ...]:
        notes = undo(files, *call_ids, force=force)
        signal.raise_signal(signal.SIGINT)
        return notes

    monkeypatch.setattr(HostFilesystem, "undo", interrupted)
    with pytest.raises(KeyboardInterrupt):
        work.saved.rewind(2, work.files)

    assert work.state == before


# To a call


@pytest.fixture
def made(tmp_path: Path) -> Iterator[CallWork]:
    with opened_run(tmp_path) as work:
        yield work


def test_chat_and_files_are_rewound_together(made: CallWork):
    made.write("a1", "b1")
    made.write("a2")

    rewind_run(made.saved, made.files, 1)

    assert (made.disk, made.notes) == ({"a": "a1"}, ("a1",))
    answers = [("tool", "Wrote a"), ("tool", NOT_MADE)]
    assert made.talk == [("user", "write"), ("model", ""), *answers]


def test_the_model_continues_with_an_answer_to_each_of_its_calls(made: CallWork):
    made.write("a1", "b1", "c1")
    rewind_run(made.saved, made.files, 2)

    seen = made.say("and now?", ("write", {"name": "d", "text": "d1"}))

    asked = next(each for each in seen if each.tool_calls)
    answered = [each.call_id for each in seen if each.role == "tool"]
    assert answered == [each.id for each in asked.tool_calls]
    assert spoken(seen)[-2:] == [("tool", NOT_MADE), ("user", "and now?")]
    assert made.disk == {"a": "a1", "b": "b1", "d": "d1"}


def test_an_interrupted_run_goes_on_without_a_message(made: CallWork):
    made.write("a1", "b1")
    rewind_run(made.saved, made.files, 1)

    assert not made.run.has_ended
    assert spoken(made.say(None, resume=True))[-1] == ("tool", NOT_MADE)
    assert made.run.has_ended


def test_before_the_first_call_of_a_turn_the_model_is_asked_again(made: CallWork):
    made.write("a1", "b1")

    rewind_run(made.saved, made.files, 1, before=True)

    assert (made.disk, made.notes, made.talk) == ({}, (), [("user", "write")])


def test_a_rewind_is_undone_by_rewinding_to_before_it(made: CallWork):
    made.write("a1", "b1")
    made.say("more", ("move", {"name": "a", "to": "c/d"}), ("note", {"text": "n"}))
    before = (made.disk, made.notes, made.talk)

    done = rewind_run(made.saved, made.files, 1)
    rewind_run(made.saved, made.files, done.number, before=True)

    assert (made.disk, made.notes, made.talk) == before


def test_a_rewind_to_where_the_run_is_changes_no_files(made: CallWork):
    made.write("a1", "b1")
    rewind_run(made.saved, made.files, 1)

    again = rewind_run(made.saved, made.files, 1)

    assert (again.undone, made.disk) == ((), {"a": "a1"})


def test_the_rewind_is_a_call_in_the_log(made: CallWork):
    made.write("a1", "b1")

    done = rewind_run(made.saved, made.files, 1)

    call = made.call(done.number)
    assert (call.tool, call.arguments) == (REWIND, {"to": f"{made.run.mark}/1"})
    assert call.committed is not None
    assert call.committed.call_id == done.call_id
    assert made.call(2).outcome == "undone"


def test_what_a_person_has_edited_stays_and_what_it_hides_is_named(made: CallWork):
    made.write("a1", "a2", "b1", "a3")
    (made.files.root / "a").write_text("mine")
    (made.files.root / "own").write_text("mine, too")

    done = rewind_run(made.saved, made.files, 1)

    assert made.disk == {"a": "mine", "own": "mine, too"}
    (note,) = done.notes
    assert note.startswith("a was changed by someone else since and is left unchanged")
    assert Path(note.rpartition(" ")[2]).read_text() == "a1"


def test_changes_of_other_runs_stay_and_are_in_the_way_only_of_the_same_files(tmp_path: Path):
    with opened_run(tmp_path) as one:
        one.write("a1", "b1")
    with opened_run(tmp_path, new=True) as two:
        two.write("a2", "x1")
    with opened_run(tmp_path, one.run) as one:
        rewind_run(one.saved, one.files, 1)
        assert one.disk == {"a": "a2", "x": "x1"}
        state = (one.disk, one.notes, one.talk)

        with pytest.raises(UndoRefused) as refused:
            rewind_run(one.saved, one.files, 1, before=True)
        assert (one.disk, one.notes, one.talk) == state
        (theirs,) = refused.value.paths["a"]
        assert theirs == two.run.calls()[0].call_id

        rewind_run(one.saved, one.files, 1, before=True, force=True)
        assert (one.disk, one.notes) == ({"x": "x1"}, ())


def test_an_undo_of_several_runs_is_not_redone_for_one_of_them(tmp_path: Path):
    with opened_run(tmp_path) as one:
        one.write("a1", "b1")
    with opened_run(tmp_path, new=True) as two:
        two.write("x1")
        two.files.undo(*(each.call_id for each in reversed(two.files.history())))
    with opened_run(tmp_path, one.run) as one:
        with pytest.raises(UndoRefused):
            rewind_run(one.saved, one.files, 2)

        assert one.disk == {}


def test_what_was_undone_since_is_redone(made: CallWork):
    """The files are as they were just after the call."""
    made.write("a1", "b1", "c1")
    made.files.undo(made.call(1).call_id)

    rewind_run(made.saved, made.files, 2)

    assert made.disk == {"a": "a1", "b": "b1"}


def test_only_files_or_only_the_conversation(made: CallWork):
    made.write("a1")
    made.write("a2")
    talk = made.talk

    done = rewind_run(made.saved, made.files, 1, parts="files")
    assert (made.disk, made.notes, made.talk) == ({"a": "a1"}, ("a1", "a2"), talk)

    rewind_run(made.saved, made.files, done.number, before=True)
    rewind_run(made.saved, made.files, 1, parts="conversation")
    assert (made.disk, made.notes) == ({"a": "a2"}, ("a1",))
    assert made.talk == talk[:3]


def test_a_rewind_needs_a_call_of_the_run(made: CallWork):
    made.write("a1")

    with pytest.raises(IndexError, match="no call 2"):
        rewind_run(made.saved, made.files, 2)


def test_what_the_history_has_forgotten_is_not_rewound(tmp_path: Path):
    with opened_run(tmp_path, history_limit=3) as work:
        work.write("a1", "a2", "a3", "a4", "a5")
        before = (work.disk, work.notes, work.talk)

        with pytest.raises(LookupError, match="no longer"):
            rewind_run(work.saved, work.files, 1)

        assert (work.disk, work.notes, work.talk) == before


def test_a_new_conversation_after_the_call_is_left_for_the_one_of_the_call(made: CallWork):
    made.write("a1")
    made.say("something else", ("write", {"name": "b", "text": "b1"}), resume=False)

    rewind_run(made.saved, made.files, 1)

    assert made.talk == [("user", "write"), ("model", ""), ("tool", "Wrote a")]
    assert made.say("go on")[0].text == "write"


def test_a_session_that_cannot_be_read_keeps_the_files_from_being_rewound(tmp_path: Path):
    """The type of a value that was there at the call is not known any more."""
    with opened_run(tmp_path) as work:

        @dataclass(frozen=True)
        class Passing:
            text: str

        work.saved.session[Passing].append(Passing("x"))
        work.write("a1")
        work.saved.session[Passing].clear()
        work.write("a2")
    with opened_run(tmp_path) as work:
        with pytest.raises(SnapshotError):
            rewind_run(work.saved, work.files, 1)

        assert (work.disk, work.notes) == ({"a": "a2"}, ("a1", "a2"))


def test_a_rewind_that_does_not_fit_on_the_disk_has_not_happened(tmp_path: Path):
    prepared(tmp_path / "place")
    with opened_run(tmp_path / "place") as work:
        work.say("".join(os.urandom(64).hex() for _ in range(10_000)))  # more than all else
        before = work.disk, work.notes, work.talk
        size = work.saved.path.stat().st_size

        def limited() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))

        for place in work.files.root, work.files.store:
            others = (path for path in place.rglob("*") if path != work.saved.path)
            assert all(path.stat().st_size < size / 2 for path in others)
    done = killed_at(tmp_path / "place", 1, 0, preexec_fn=limited)
    assert "File too large" in done.stderr or "bytes fit into" in done.stderr

    with opened_run(tmp_path / "place") as work:
        work.saved.recover(work.files)
        assert (work.disk, work.notes, work.talk) == before


def killed_at(
    place: Path, call: int, kill_at: int, **options: Any
) -> subprocess.CompletedProcess[str]:
    child = Path(__file__).with_name("rewind_child.py")
    command = [sys.executable, str(child), str(place), str(call), str(kill_at)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def prepared(place: Path) -> tuple[object, ...]:
    place.mkdir()
    with opened_run(place) as work:
        work.write("a1", "b1")
        work.say(
            "more", ("move", {"name": "b", "to": "c/d"}), ("write", {"name": "a", "text": "a2"})
        )
        return work.disk, work.notes, work.talk


def test_a_rewind_takes_no_more_steps_in_a_long_run(tmp_path: Path):
    """It opens only what has changed since the call."""
    taken: list[int] = []
    for count in (4, 40):
        place = tmp_path / str(count)
        place.mkdir()
        with opened_run(place) as work:
            for number in range(count):
                work.write(f"a{number}")
        taken.append(int(killed_at(place, count - 1, 0).stdout))
        with opened_run(place) as work:
            assert work.disk == {"a": f"a{count - 2}"}

    assert taken[0] == taken[1]


def test_values_that_were_replaced_since_are_restored(made: CallWork):
    made.write(*(f"a{number}" for number in range(40)))
    before = (made.notes, made.talk)
    made.saved.session[Note].update(lambda notes: notes.replace(*reversed(notes.all()[:35])))
    made.write("b1")
    made.saved.session[Note].clear()
    made.write("c1", "c2")

    done = rewind_run(made.saved, made.files, 41)
    reversed_notes = tuple(f"a{number}" for number in reversed(range(35)))
    assert made.notes == (*reversed_notes, "b1")

    rewind_run(made.saved, made.files, 40)
    assert (made.notes, made.talk) == (before[0], before[1][:-1])

    rewind_run(made.saved, made.files, done.number, before=True)
    assert made.notes == ("c1", "c2")


def test_a_call_of_a_killed_run_is_found_behind_the_calls_of_others(tmp_path: Path):
    """The history is read back to the last call that the run has on record."""
    with opened_run(tmp_path) as one:
        one.write("a1")
        one.files.transact(
            lambda changes: changes.write(("b",), b"lost"),
            ToolCall("write", {}, f"{one.run.mark}:x"),
        )
    with opened_run(tmp_path, new=True) as two:
        two.write("x1", "x2")
    with opened_run(tmp_path, one.run) as one:
        assert one.saved.recover(one.files) == (f"{one.run.mark}:x",)

        assert one.disk == {"a": "a1", "x": "x2"}


@pytest.mark.heavy
def test_a_rewind_that_is_killed_anywhere_has_happened_or_not(tmp_path: Path):
    old = prepared(tmp_path / "whole")
    points = int(killed_at(tmp_path / "whole", 1, 0).stdout)
    with opened_run(tmp_path / "whole") as work:
        new = work.disk, work.notes, work.talk
    step = 1 if HEAVY else max(points // 6, 1)
    seen: list[str] = []
    for kill_at in [*range(1, points + 1, step), points]:
        place = tmp_path / f"killed-{kill_at}-{len(seen)}"
        assert prepared(place) == old
        done = killed_at(place, 1, kill_at)
        assert done.returncode == -signal.SIGKILL, done.stderr
        with opened_run(place) as work:
            work.saved.recover(work.files)
            state = work.disk, work.notes, work.talk
            assert state in (old, new), kill_at
            seen.append("old" if state == old else "new")

            rewind_run(work.saved, work.files, 1)
            assert (work.disk, work.notes, work.talk) == new

    assert seen == sorted(seen, reverse=True)
    assert seen[0] == "old"
