"""Going back in a conversation: to before a message, with the state and the files of that time."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weakincentives as wink
from weakincentives.adapters import Message, ModelRequest, ScriptedAdapter, calls
from weakincentives.errors import UndoRefused
from weakincentives.filesystem import HostFilesystem
from weakincentives.prompt import MarkdownSection, Prompt, PromptTemplate
from weakincentives.runtime import SavedSession, Session, ToolInvoked
from weakincentives.runtime.calls import Run


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
